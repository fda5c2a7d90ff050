// A conversation: turns that the tab keeps, and answers whose drafted tokens are marked.

import { Failure, stream } from "./api.js";
import { byId, copyButton, count, element, fixed, speed } from "./dom.js";
import { markdown } from "./markdown.js";

const STORE = "slipstream.conversation";
const ENDS = { length: "cut off at max tokens", stop: "", tool_calls: "" };

// A turn is a message of the API, and of an answer also:
// drafted: stretches [start, end] of the content; reasoning: a text; told: its figures in words;
// ended: how it ended, in words; failed: the error's message.
export class Conversation {
  // request: gives what is sent for messages, less what is for streams; may throw a Failure. changed: called when the
  // messages are others, busy when an answer begins or ends, refused with a Failure of the server's.
  constructor({ request, changed, busy, refused }) {
    this._request = request;
    this._changed = changed;
    this._busy = busy;
    this._refused = refused;
    this._abort = null;
    this.enabled = false;
    this._list = byId("turns");
    this._log = byId("log");
    this._composer = byId("message");
    this._restore();
    this._listen();
    this._draw();
  }

  get running() {
    return this._abort !== null;
  }

  // What the next request has; `draft`: what is in the composer, though it was not sent.
  messages({ draft = false } = {}) {
    const system = byId("system").value.trim();
    const written = draft && !this.running ? this._composer.value.trim() : "";
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...this._turns.filter((turn) => turn.role !== "assistant" || turn.content || turn.tool_calls).map(message),
      ...(written ? [{ role: "user", content: written }] : []),
    ];
  }

  stop() {
    this._abort?.abort();
  }

  send() {
    const content = this._composer.value.trim();
    if (!content || this.running || !this.enabled) return;
    this._composer.value = "";
    this._turns.push({ role: "user", content });
    this._answer();
  }

  _listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this._composer.addEventListener("keydown", (event) => {
      // While a word is being composed, Enter chooses it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      event.stopPropagation();
      this.send();
    });
    byId("stop-answer").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this._clear());
    byId("system").addEventListener("input", () => this._keep());
  }

  _clear() {
    this.stop();
    this._turns = [];
    this._draw();
    this._keep();
    announce("The conversation is empty.");
    this._composer.focus();
  }

  // Asks for the last answer once more, or for one that failed.
  _again() {
    if (this.running) return;
    if (this._turns.at(-1).role === "assistant") this._turns.pop();
    this._answer();
  }

  async _answer() {
    const messages = this.messages();
    const turn = { role: "assistant", content: "" };
    this._turns.push(turn);
    this._draw();
    this._log.scrollTop = this._log.scrollHeight;
    const answer = new Answer(turn, this._list.lastElementChild, this._log);
    this._abort = new AbortController();
    this._setBusy(true);
    announce("The model answers.");
    try {
      const body = { ...this._request(messages), stream: true, stream_options: { include_usage: true } };
      for await (const chunk of stream("v1/chat/completions", body, this._abort.signal)) answer.accept(chunk);
    } catch (error) {
      if (error.name === "AbortError") turn.ended = "stopped";
      else if (error instanceof Failure) {
        turn.failed = error.message;
        this._refused(error);
      } else throw error;
    } finally {
      answer.end();
      this._abort = null;
      this._setBusy(false);
    }
    // The conversation may have been cleared meanwhile.
    if (!this._turns.includes(turn)) return;
    this._redrawLast();
    this._keep();
    announce(turn.failed ? "" : `The answer is there. ${[turn.told, turn.ended].filter(Boolean).join(", ")}`);
  }

  _setBusy(running) {
    const focused = document.activeElement;
    byId("send").hidden = running;
    byId("stop-answer").hidden = !running;
    // Focus goes from the button that leaves to the one that comes.
    if (running && focused === byId("send")) byId("stop-answer").focus();
    if (!running && focused === byId("stop-answer")) byId("send").focus();
    this._log.setAttribute("aria-busy", String(running));
    this._busy(running);
  }

  _draw() {
    this._list.replaceChildren(...this._turns.map((turn, at) => this._item(turn, at)));
    byId("nothing-said").hidden = this._turns.length > 0;
    byId("clear").disabled = this._turns.length === 0;
    this._changed();
  }

  _redrawLast() {
    const follows = isAtEnd(this._log);
    this._list.lastElementChild.replaceWith(this._item(this._turns.at(-1), this._turns.length - 1));
    if (follows) this._log.scrollTop = this._log.scrollHeight;
    this._changed();
  }

  _item(turn, at) {
    const item = element("li", { className: `turn ${turn.role}` });
    item.append(element("p", { className: "who" }, WHO[turn.role] ?? turn.role));
    const body = element("div", { className: "said" });
    item.append(body);
    if (turn.role !== "assistant") {
      body.append(turn.role === "tool" ? element("pre", { tabIndex: 0 }, turn.content) : turn.content);
      return item;
    }
    showAnswer(body, turn);
    const isLast = at === this._turns.length - 1;
    if (turn.failed) item.append(element("p", { className: "error", role: "alert" }, turn.failed));
    const told = [turn.told, turn.ended].filter(Boolean).join(", ");
    const buttons = [];
    if (turn.content) buttons.push(copyButton(() => turn.content, announce));
    if (isLast) {
      const label = turn.failed ? "Try again" : "Regenerate";
      const again = element("button", { type: "button", className: "small" }, label);
      again.addEventListener("click", () => this._again());
      buttons.push(again);
    }
    item.append(element("div", { className: "below" }, element("p", { className: "muted" }, told), ...buttons));
    if (isLast && turn.tool_calls && !turn.failed) item.append(this._results(turn.tool_calls));
    return item;
  }

  // The form for what the tools that were called have answered.
  _results(calls) {
    const fields = calls.map((call, at) => {
      const input = element("textarea", { rows: 2, id: `result-${at}`, spellcheck: false, required: true });
      const label = element("label", { htmlFor: input.id }, `What ${call.function.name} returns`);
      return element("div", { className: "field" }, label, input);
    });
    const form = element("form", { className: "results" }, ...fields);
    const send = calls.length > 1 ? "Send the results" : "Send the result";
    form.append(element("button", { type: "submit", className: "small" }, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      calls.forEach((call, at) => {
        const content = form.querySelector(`#result-${at}`).value;
        this._turns.push({ role: "tool", tool_call_id: call.id, name: call.function.name, content });
      });
      this._answer();
      this._composer.focus();
    });
    return form;
  }

  _keep() {
    const kept = JSON.stringify({ system: byId("system").value, turns: this._turns });
    try {
      sessionStorage.setItem(STORE, kept);
    } catch {
      // It has become too long to be kept; it is still on the page.
    }
    this._changed();
  }

  _restore() {
    const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    this._turns = kept.turns ?? [];
    byId("system").value = kept.system ?? "";
  }
}

const WHO = { user: "You", assistant: "Model", tool: "Tool" };

// An answer as it comes, drawn once per frame into its item of the list.
class Answer {
  constructor(turn, item, log) {
    this._turn = turn;
    this._body = item.querySelector(".said");
    this._log = log;
    this._tokens = [];
    this._frame = 0;
    this._first = this._last = null;
    this._numFirst = this._numSteps = 0;
    this._body.textContent = "…";
  }

  accept(chunk) {
    if (chunk.usage) this._usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (content) this._turn.content += content;
    if (reasoning) this._turn.reasoning = (this._turn.reasoning ?? "") + reasoning;
    for (const call of calls ?? []) this._call(call);
    if (choice.finish_reason) this._turn.ended = ENDS[choice.finish_reason] ?? choice.finish_reason;
    const tokens = choice.tokens ?? [];
    if (tokens.length) {
      this._last = performance.now();
      this._first ??= this._last;
      this._numFirst ||= tokens.length;
    }
    this._numSteps += choice.num_steps ?? 0;
    tokens.forEach((token, at) => this._tokens.push({ ...token, begins: at === 0 }));
    if (!this._frame) this._frame = requestAnimationFrame(() => this._draw());
  }

  _call({ index, id, function: part }) {
    const calls = (this._turn.tool_calls ??= []);
    calls[index] ??= { id, type: "function", function: { name: part.name, arguments: "" } };
    calls[index].function.arguments += part.arguments ?? "";
  }

  end() {
    cancelAnimationFrame(this._frame);
    this._turn.drafted = drafted(this._tokens, this._turn.content);
    this._turn.told = this._tell();
  }

  _draw() {
    this._frame = 0;
    const follows = isAtEnd(this._log);
    this._turn.drafted = drafted(this._tokens, this._turn.content);
    showAnswer(this._body, this._turn);
    if (follows) this._log.scrollTop = this._log.scrollHeight;
  }

  _tell() {
    const number = this._usage?.completion_tokens ?? this._tokens.length;
    if (!number) return "";
    const steps = this._usage?.speculative.num_steps ?? this._numSteps;
    const marked = this._tokens.filter((token) => token.drafted).length;
    const parts = [`${count(number, "token")} in ${count(steps, "step")}`, `${marked} of them drafted`];
    const rate = speed(this._tokens.length - this._numFirst, this._last - this._first);
    if (rate !== null) parts.push(`${fixed(rate, 0)} tokens/s`);
    return parts.join(", ");
  }
}

function message({ role, content, tool_calls: calls, tool_call_id: call }) {
  return { role, content, ...(calls && { tool_calls: calls }), ...(call && { tool_call_id: call }) };
}

function showAnswer(body, turn) {
  const { content, reasoning, tool_calls: calls } = turn;
  const parts = content ? markdown(content, painter(content, turn.drafted ?? [])) : [];
  if (reasoning) {
    const isOpen = body.querySelector("details")?.open ?? false;
    parts.unshift(
      element("details", { open: isOpen }, element("summary", {}, "Thinking"), element("p", {}, reasoning)),
    );
  }
  for (const { function: called } of calls ?? []) {
    const code = element("code", {}, `${called.name}(${called.arguments})`);
    const box = element("pre", { tabIndex: 0 }, code);
    box.dataset.language = "calls a tool";
    parts.push(box);
  }
  body.replaceChildren(...parts);
}

// Nodes of a stretch of the text, drafted parts marked.
function painter(text, stretches) {
  return (start, end) => {
    const nodes = [];
    let done = start;
    for (const [from, to] of stretches) {
      if (to <= start || from >= end) continue;
      const [low, high] = [Math.max(from, start), Math.min(to, end)];
      if (low > done) nodes.push(text.slice(done, low));
      nodes.push(element("span", { className: "drafted" }, text.slice(low, high)));
      done = high;
    }
    if (done < end) nodes.push(text.slice(done, end));
    return nodes;
  };
}

// Stretches of the content that came from drafts, one for each step's run. The tokens' text has the
// content within it, between marks of calls and thoughts; where it has not, nothing is marked.
function drafted(tokens, content) {
  const shift = tokens.map(({ text }) => text).join("").indexOf(content);
  if (shift < 0 || !content) return [];
  const stretches = [];
  let at = -shift;
  let open = false;
  for (const token of tokens) {
    const end = at + token.text.length;
    const [low, high] = [Math.max(at, 0), Math.min(end, content.length)];
    if (token.drafted && low < high) {
      if (open && !token.begins) stretches.at(-1)[1] = high;
      else stretches.push([low, high]);
    }
    open = token.drafted && low < high;
    at = end;
  }
  return stretches;
}

const isAtEnd = (box) => box.scrollTop + box.clientHeight >= box.scrollHeight - 24;

function announce(text) {
  byId("said").textContent = text;
}
