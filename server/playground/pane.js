// One of the two streams: its text, its figures, its steps. Data comes in by `accept` as fast as it
// likes; what is shown changes once per frame, in boxes whose sizes do not.

import { byId, element, figures, fixed, percent, seconds, speed } from "./dom.js";

const NUM_BARS = 48;
const BAR_WIDTH = 256 / NUM_BARS;
const BAR_HEIGHT = 32;
const SVG = "http://www.w3.org/2000/svg";

// Name, label, and what it means.
export const FIGURES = [
  ["speedup", "Speed-up", "Tokens/s with drafts over tokens/s without, each with the engine to itself."],
  ["perStep", "Tokens/step", "How many tokens a step of the model wrote, the one that ends the text included."],
  ["accepted", "Acceptance", "The share of the checked draft tokens that the model confirmed."],
  ["gamma", "Gamma", "Draft tokens that were checked in the last step; in brackets the mean of all steps."],
  ["tokens", "Tokens", "What was written so far."],
  ["steps", "Steps", "Forward passes of the model that wrote for this request."],
  ["rate", "Tokens/s", "How fast the text came, after its first tokens."],
  ["first", "First token", "How long the prompt took, the wait for a place in the batch included."],
];

const STATUSES = { stop: "complete", length: "done: max tokens" };

export class Pane {
  constructor(root, title) {
    root.append(byId("pane-template").content.cloneNode(true));
    this.root = root;
    this._title = root.querySelector("h2");
    this._title.id = `${root.id}-title`;
    this._status = root.querySelector(".status");
    this._progress = root.querySelector(".progress span");
    this._text = root.querySelector(".text");
    this._text.setAttribute("aria-labelledby", this._title.id);
    this._error = root.querySelector(".error");
    this._bars = root.querySelector("svg");
    this._show = figures(root.querySelector("dl"), FIGURES);
    this._frame = 0;
    this.name(title, "");
    this.reset(0);
    this._status.textContent = "";
  }

  name(title, caption) {
    this._title.textContent = title;
    this.root.querySelector("figcaption").textContent = caption;
  }

  reset(maxTokens) {
    this.state = "waiting";
    this.tokens = [];
    this.usage = null;
    this.failure = null;
    this.numSteps = this.numDrafted = this.numAccepted = this.numFirst = 0;
    this.started = this.first = this.last = null;
    this._maxTokens = maxTokens;
    this._steps = [];
    this._numShown = 0;
    this._run = null;
    this._text.replaceChildren();
    this._error.textContent = "";
    this.root.classList.remove("failed");
    this._status.textContent = "waiting";
    this._show("speedup", "–");
    this._draw();
  }

  begin() {
    this.started = performance.now();
    this.state = "writing";
    this._status.textContent = "reading";
  }

  // A chunk of the stream: what one step wrote, or several whose text was held back.
  accept(chunk) {
    if (chunk.usage) this._settle(chunk.usage);
    const choice = chunk.choices[0];
    if (!choice) return;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const tokens = choice.tokens ?? [];
    if (tokens.length) {
      this.last = performance.now();
      if (this.first === null) {
        this.first = this.last;
        this.numFirst = tokens.length;
        this._status.textContent = "writing";
      }
    }
    const numSteps = choice.num_steps ?? (tokens.length ? 1 : 0);
    const accepted = tokens.filter((token) => token.drafted).length;
    const granted = choice.num_draft_tokens ?? accepted;
    this.numSteps += numSteps;
    this.numDrafted += granted;
    this.numAccepted += accepted;
    if (numSteps) this._steps.push({ granted, accepted, numSteps });
    // A run of drafts ends with its step.
    tokens.forEach((token, at) => this.tokens.push({ ...token, begins: at === 0 }));
    if (!this._frame) this._frame = requestAnimationFrame(() => this._draw());
  }

  // The server's account. It has the token that ends the text, which is in no chunk.
  _settle(usage) {
    this.usage = usage;
    const { num_steps, num_draft_tokens, num_accepted_tokens } = usage.speculative;
    [this.numSteps, this.numDrafted] = [num_steps, num_draft_tokens];
    this.numAccepted = num_accepted_tokens;
  }

  end() {
    this.state = "done";
    this._status.textContent = STATUSES[this.finishReason] ?? "done";
    this._draw();
  }

  stop() {
    this.state = "stopped";
    this._status.textContent = "stopped";
    this._draw();
  }

  fail(error) {
    this.state = "failed";
    this.failure = error;
    const written = this.tokens.length;
    this._status.textContent = written ? "broke off" : "failed";
    this._error.textContent = written ? `${error.message} The text is not complete.` : error.message;
    this.root.classList.add("failed");
    this._draw();
  }

  // Tokens per second after the first chunk; null while there is nothing to go by.
  get rate() {
    return this.first === null ? null : speed(this.tokens.length - this.numFirst, this.last - this.first);
  }

  speedup(text) {
    this._show("speedup", text);
  }

  // Marks the token from which on this text is not the other one's.
  markDifference(index) {
    this._text.replaceChildren();
    this._run = null;
    this._append(this.tokens.slice(0, index));
    const token = this.tokens[index];
    const text = token ? token.text.replaceAll("\n", "⏎\n") : "";
    this._text.append(element("mark", {}, text || "∅"));
    this._run = null;
    this._append(this.tokens.slice(index + 1));
    this._text.querySelector("mark").scrollIntoView({ block: "nearest" });
  }

  _draw() {
    cancelAnimationFrame(this._frame);
    this._frame = 0;
    const box = this._text;
    const follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
    this._append(this.tokens.slice(this._numShown));
    this._numShown = this.tokens.length;
    if (follows) box.scrollTop = box.scrollHeight;
    this._drawFigures();
    this._drawBars();
  }

  _append(tokens) {
    for (const token of tokens) {
      if (!token.drafted) {
        this._run = null;
        this._text.append(token.text);
        continue;
      }
      if (this._run === null || token.begins) {
        this._run = element("span", { className: "drafted" });
        this._text.append(this._run);
      }
      this._run.append(token.text);
    }
  }

  _drawFigures() {
    const numTokens = this.usage?.completion_tokens ?? this.tokens.length;
    const numSteps = this.numSteps;
    const share = this._maxTokens ? Math.min(1, numTokens / this._maxTokens) : 0;
    this._progress.style.transform = `scaleX(${this.state === "done" ? 1 : share})`;
    const last = this._steps.at(-1);
    this._show("tokens", numTokens ? String(numTokens) : "–");
    this._show("steps", numSteps ? String(numSteps) : "–");
    const numEnds = this.usage && this.finishReason === "stop" ? 1 : 0;
    this._show("perStep", numSteps ? fixed((numTokens + numEnds) / numSteps, 2) : "–");
    this._show("gamma", last ? this._gamma(last.granted) : "–");
    this._show("accepted", percent(this.numAccepted, this.numDrafted));
    this._show("rate", this.rate === null ? "–" : fixed(this.rate, 0));
    this._show("first", this.first === null ? "–" : seconds(this.first - this.started));
  }

  _gamma(newest) {
    if (!this.numDrafted) return String(newest);
    return `${newest} (${fixed(this.numDrafted / this.numSteps, 1)})`;
  }

  // The last steps as bars: what was granted as an outline, what was accepted filled in.
  _drawBars() {
    const steps = this._steps.slice(-NUM_BARS);
    const most = Math.max(8, ...steps.map((step) => step.granted / step.numSteps));
    const bars = steps.flatMap((step, at) => [
      bar("granted", at, step.granted / step.numSteps / most),
      bar("accepted", at, step.accepted / step.numSteps / most),
    ]);
    this._bars.replaceChildren(...bars);
  }
}

function bar(kind, at, share) {
  const rect = document.createElementNS(SVG, "rect");
  // A step without drafts is a line at the bottom.
  const height = Math.max(kind === "granted" ? 1 : 0, share * BAR_HEIGHT);
  const shape = { x: at * BAR_WIDTH + 0.5, y: BAR_HEIGHT - height, width: BAR_WIDTH - 1, height };
  for (const [name, value] of Object.entries(shape)) rect.setAttribute(name, value);
  rect.setAttribute("class", kind);
  return rect;
}
