// A run: the same request twice, with drafts and without, and what came of it in words.

import { stream } from "./api.js";
import { byId, count, fixed, times } from "./dom.js";


// What both panes send, and the drafted one's guesses: its `speculative` and `prediction`.
export function bodies(request, guesses) {
  const shared = { ...request, stream: true, stream_options: { include_usage: true } };
  const plain = { ...shared, speculative: { draft_strategy: "none", return_drafted: true } };
  return { drafted: { ...shared, ...guesses }, plain };
}

export class Race {
  // server: the model card of /v1/models, for what equality may be expected.
  constructor(drafted, plain, server) {
    this._drafted = drafted;
    this._plain = plain;
    this._server = server;
    this._abort = null;
  }

  get running() {
    return this._abort !== null;
  }

  stop() {
    this._abort?.abort();
  }

  // Resolves when both streams have ended, however they did; failures are shown in their panes.
  async run(path, { drafted, plain }, { apart, verification }) {
    this._abort = new AbortController();
    const signal = this._abort.signal;
    this._verification = verification;
    this._sharesSteps = !apart;
    for (const pane of [this._drafted, this._plain]) pane.reset(drafted.max_tokens ?? 0);
    byId("verdict").textContent = apart
      ? "First without drafts, then with them: each has the engine to itself."
      : "Both are written at once and share the engine's steps.";
    announce("Running.");
    const ticking = setInterval(() => this._tell(), 150);
    try {
      if (apart) {
        await this._write(this._plain, path, plain, signal);
        // What no longer runs cannot be compared with: the reason is in its pane.
        if (this._plain.state === "done") await this._write(this._drafted, path, drafted, signal);
        else this._drafted.stop();
      } else {
        await Promise.all([
          this._write(this._drafted, path, drafted, signal),
          this._write(this._plain, path, plain, signal),
        ]);
      }
    } finally {
      clearInterval(ticking);
      this._abort = null;
    }
    this._conclude();
  }

  async _write(pane, path, body, signal) {
    pane.begin();
    try {
      for await (const chunk of stream(path, body, signal)) pane.accept(chunk);
      pane.end();
    } catch (error) {
      if (error.name === "AbortError") pane.stop();
      else pane.fail(error);
    }
  }

  // The one speed-up of the page, in words: tokens per second after the first ones with drafts, over those
  // without, where each had the engine to itself; null where it cannot be told.
  get _speedup() {
    const [fast, slow] = [this._drafted.rate, this._plain.rate];
    return this._sharesSteps || fast === null || slow === null ? null : times(fast / slow);
  }

  _tell() {
    const [ahead, behind] = [this._drafted, this._plain];
    if (!ahead.tokens.length && !behind.tokens.length) return;
    if (this._speedup !== null) ahead.speedup(this._speedup);
    byId("verdict").textContent = this._sharesSteps
      ? `So far ${count(ahead.tokens.length, "token")} with drafts and ${behind.tokens.length} without.`
      : `So far ${count(behind.tokens.length, "token")} without drafts, and ${ahead.tokens.length} with them.`;
  }

  _conclude() {
    this._tell();
    const verdict = this._verdict();
    byId("verdict").textContent = verdict;
    byId("verdict").dataset.outcome = this._outcome;
    announce(verdict);
  }

  _verdict() {
    const panes = [this._drafted, this._plain];
    this._outcome = "none";
    if (panes.some((pane) => pane.state === "failed")) {
      this._outcome = "failed";
      const both = panes.every((pane) => pane.state === "failed");
      const which = this._drafted.state === "failed" ? "with" : "without";
      const who = both ? "Both requests" : `The request ${which} drafts`;
      const { failure } = panes.find((pane) => pane.state === "failed");
      return `${who} failed: ${failure.message}`;
    }
    const index = firstDifference(this._drafted.tokens, this._plain.tokens);
    if (panes.some((pane) => pane.state === "stopped")) {
      const shorter = Math.min(...panes.map((pane) => pane.tokens.length));
      const same = index === null || index >= shorter;
      if (!shorter) return "Stopped.";
      return `Stopped. The texts are ${same ? "equal as far as both go" : "different"}.`;
    }
    return `${this._equality(index)} ${this._timing()}`;
  }

  _equality(index) {
    if (index === null) {
      this._outcome = "equal";
      const number = this._plain.usage?.completion_tokens ?? this._plain.tokens.length;
      return `The two texts are equal, all ${count(number, "token")}.`;
    }
    this._outcome = "different";
    for (const pane of [this._drafted, this._plain]) pane.markDifference(index);
    return `The two texts differ from token ${index + 1} on. ${this._why()}`;
  }

  _why() {
    if (this._verification !== "match") {
      return `${this._verification} keeps the distribution of the text, not its tokens.`;
    }
    if (this._server.determinism !== "exact" || this._server.exact_verified === false) {
      return "This server's kernels round by batch size, so nearly tied tokens may fall either way.";
    }
    return "That should not be: this server is exact. Please report it with the request.";
  }

  _timing() {
    const [fast, slow] = [this._drafted, this._plain];
    if (this._sharesSteps) {
      const [few, many] = [count(fast.numSteps, "step"), slow.numSteps];
      return `With drafts it took ${few}, without them ${many}.`;
    }
    if (this._speedup === null) return "It was too short to be timed.";
    const rates = `${fixed(fast.rate, 0)} tokens per second with drafts and ${fixed(slow.rate, 0)} without`;
    return this._outcome === "equal" ? `${rates}: ${this._speedup} as fast.` : `${rates}.`;
  }
}

// The index of the first token that differs; null where there is none.
function firstDifference(left, right) {
  const length = Math.max(left.length, right.length);
  for (let at = 0; at < length; at += 1) {
    if (left[at]?.id !== right[at]?.id) return at;
  }
  return null;
}

function announce(text) {
  byId("announce").textContent = text;
}
