// The running engine, read from /metrics: what any scraper sees, a few times a second.

import { getMetrics } from "./api.js";
import { byId, element, figures, fixed, percent } from "./dom.js";

const IDLE_MS = 1500;
const BUSY_MS = 400;
const STATES = ["committed", "draft", "cached", "free"];

const FIGURES = [
  ["running", "In the batch"],
  ["waiting", "In the queue"],
  ["rate", "Tokens/s", "All requests, since the last look"],
  ["gamma", "Mean gamma", "Draft tokens per request and step, since the last look"],
  ["hits", "Prefix hits", "Prompt tokens found in the prefix cache, since the start"],
  ["preemptions", "Preemptions", "Since the start"],
];

export class EnginePanel {
  constructor() {
    this._show = figures(byId("engine-figures"), FIGURES);
    this._before = null;
    this._timer = 0;
    this._parts = new Map(
      STATES.map((state) => {
        const part = element("span", { className: state });
        const number = element("b", {}, "–");
        byId("kv-bar").append(part);
        const swatch = element("i", { className: state });
        byId("kv-states").append(element("li", {}, swatch, `${state} `, number));
        return [state, { part, number }];
      }),
    );
    // Small until something runs; after that it is the reader's.
    this._hasRun = false;
    this._isBusy = false;
    this.model = "";
    document.addEventListener("visibilitychange", () => this.watch());
    this.watch();
  }

  // Whether this page waits for an answer: then there is more to see, and more often.
  set busy(busy) {
    this._isBusy = busy;
    if (busy) this._unfold();
    this.watch();
  }

  _unfold() {
    if (!this._hasRun) byId("engine").open = this._hasRun = true;
  }

  // Look now, and from then on.
  async watch() {
    clearTimeout(this._timer);
    if (document.hidden) return;
    const turn = (this._turn = (this._turn ?? 0) + 1);
    try {
      this._draw(await getMetrics());
    } catch {
      tell("no figures: the server cannot be reached");
      this._before = null;
    }
    // A later call has taken over where the number has moved on.
    if (turn === this._turn) {
      this._timer = setTimeout(() => this.watch(), this._isBusy ? BUSY_MS : IDLE_MS);
    }
  }

  _draw(all) {
    const values = ofModel(all, this.model);
    const read = (name) => values.get(`slipstream_${name}`) ?? 0;
    const sum = (name) =>
      [...values].reduce(
        (total, [key, value]) => (key.startsWith(`slipstream_${name}{`) && !/[{,]model=/.test(key) ? total + value : total),
        0,
      );
    const now = {
      time: performance.now(),
      tokens: read("generation_tokens_total"),
      steps: sum("spec_gamma_count"),
      gammas: sum("spec_gamma_sum"),
    };
    const before = this._before ?? now;
    this._before = now;
    const steps = now.steps - before.steps;
    const passed = (now.time - before.time) / 1000;
    const [running, waiting] = [read("requests_running"), read("requests_waiting")];
    this._show("running", String(running));
    this._show("waiting", String(waiting));
    tell(running ? `${running} running, ${waiting} waiting` : "idle");
    if (running) this._unfold();
    this._show("rate", passed > 0 ? fixed((now.tokens - before.tokens) / passed, 0) : "–");
    this._show("gamma", steps > 0 ? fixed((now.gammas - before.gammas) / steps, 1) : "–");
    this._show("hits", percent(read("prefix_cache_hits_total"), read("prefix_cache_queries_total")));
    this._show("preemptions", String(read("preemptions_total")));
    this._drawBlocks(values, read("kv_blocks_total"), read("kv_block_size"));
  }

  _drawBlocks(values, total, size) {
    byId("kv-total").textContent = total ? `${total} of ${size} tokens each` : "";
    const known = STATES.some((state) => values.has(`slipstream_kv_blocks{state="${state}"}`));
    for (const [state, { part, number }] of this._parts) {
      // Before the first step nothing has been told: all blocks are free.
      const untold = state === "free" ? total : 0;
      const blocks = known ? (values.get(`slipstream_kv_blocks{state="${state}"}`) ?? 0) : untold;
      number.textContent = String(blocks);
      part.style.flexGrow = String(blocks);
      part.hidden = blocks === 0;
    }
  }
}

function tell(state) {
  if (byId("engine-state").textContent !== state) byId("engine-state").textContent = state;
}

// Of several models this one's series, called as those of a server of one model.
function ofModel(values, model) {
  const own = `model=${JSON.stringify(model)}`;
  const name = (key) => key.replace(`{${own}}`, "").replace(`{${own},`, "{").replace(`,${own}`, "");
  return new Map([...values].map(([key, value]) => [name(key), value]));
}
