// Puts the page together: examples, the request's form, the two panes, the engine.

import { getJson, setKey } from "./api.js";
import { byId, element } from "./dom.js";
import { EnginePanel } from "./engine.js";
import { EXAMPLES } from "./examples.js";
import { Pane } from "./pane.js";
import { bodies, Race } from "./run.js";
import { SpeculationForm } from "./speculation.js";

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };
const WIDE = matchMedia("(min-width: 60rem)");

const drafted = new Pane(byId("drafted"), "With drafts");
const plain = new Pane(byId("plain"), "Without drafts");
plain.name("Without drafts", "One token in every step.");
const engine = new EnginePanel();
let speculation = null;
let race = null;
let model = null;

let newestLoad = 0;

async function load() {
  const thisLoad = (newestLoad += 1);
  try {
    // Of several models the one that the page's address names, else the first; asking for its drafters
    // loads it, and only then does its card say all.
    const first = (await getJson("v1/models")).data[0];
    const name = new URLSearchParams(location.search).get("model") ?? first.id;
    const catalogue = await getJson(`v1/drafters?model=${encodeURIComponent(name)}`);
    const card = (await getJson("v1/models")).data.find((each) => each.id === name) ?? first;
    if (thisLoad !== newestLoad) return;
    byId("key-form").hidden = true;
    byId("notice").hidden = true;
    setUp(card, catalogue);
  } catch (error) {
    // An earlier key's refusal may come after a later key was taken.
    if (thisLoad !== newestLoad) return;
    if (error.status === 401) askForKey();
    else say(`${error.message} Reload the page to try again.`);
  }
}

function askForKey() {
  const form = byId("key-form");
  byId("model").textContent = "The server says what it serves once it has a key.";
  if (!form.hidden) byId("key-error").textContent = "The server does not take this key.";
  form.hidden = false;
  byId("key").focus();
}

function say(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = false;
}

function setUp(card, catalogue) {
  model = engine.model = card.id;
  byId("model").textContent = describe(card);
  const chats = card.has_chat_template;
  radio("mode", "chat").disabled = !chats;
  radio("mode", "chat").parentElement.title = chats ? "" : "The model has no chat template.";
  byId("max-tokens").max = card.max_model_len;
  const examples = EXAMPLES.filter(
    (each) => each.suits(card) && (chats || each.mode === "completion"),
  );
  byId("example").replaceChildren(
    ...examples.map((each) => element("option", { value: EXAMPLES.indexOf(each) }, each.name)),
  );
  fill(examples[0]);
  speculation = new SpeculationForm(byId("speculative"), catalogue, showSpeculation);
  race = new Race(drafted, plain, card);
  showSpeculation();
  // Not before it is complete: what is filled in later would move.
  byId("main").hidden = false;
}

function describe(card) {
  const size = card.num_parameters >= 1e9 ? card.num_parameters / 1e9 : card.num_parameters / 1e6;
  const unit = card.num_parameters >= 1e9 ? "B" : "M";
  const weights = card.quantization ? `${+card.quantization.bits.toFixed(2)} bits per weight` : card.dtype;
  const parts = [card.id, `${size.toFixed(1)} ${unit} parameters`, weights, card.determinism];
  return parts.join(" · ");
}

function fill(example) {
  radio("mode", example.mode).checked = true;
  byId("prompt").value = example.text;
  byId("max-tokens").value = example.maxTokens;
  byId("temperature").value = example.temperature;
  nameThePrompt();
}

function radio(name, value) {
  return document.querySelector(`input[name="${name}"][value="${value}"]`);
}

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

function nameThePrompt() {
  byId("prompt-label").textContent = chosen("mode") === "chat" ? "Message" : "Prompt";
}

// What the speculation form says shows in the summary, the JSON, the legend and the pane's title.
function showSpeculation() {
  const id = speculation.drafter.id;
  byId("speculation-summary").textContent = speculation.summary();
  byId("json").textContent = JSON.stringify(
    { ...speculation.object(), return_drafted: true },
    null,
    2,
  );
  if (!race?.running) nameDrafter(id);
}

function nameDrafter(id) {
  const none = id === "none";
  document.documentElement.style.setProperty("--hue", String(speculation.hue));
  const caption = "Drafts in each step: checked (outline), accepted (filled).";
  drafted.name(none ? "Drafter none" : `With drafts by ${id}`, none ? "One token in every step." : caption);
  const swatch = element("span", { className: "drafted" }, "marked tokens");
  byId("legend").replaceChildren(
    ...(none
      ? ["Both panes decode without drafts: choose a drafter under Speculation."]
      : [swatch, ` were guessed by ${id} and confirmed by the model; the model wrote the others.`]),
  );
}

function request() {
  const asked = {};
  const text = byId("prompt").value;
  if (chosen("mode") === "chat") asked.messages = [{ role: "user", content: text }];
  else asked.prompt = text;
  for (const name of ["max-tokens", "temperature", "seed"]) {
    const { value } = byId(name);
    if (value !== "") asked[name.replace("-", "_")] = Number(value);
  }
  if (asked.seed === undefined) {
    // Both panes need the same one, so it is chosen here.
    asked.seed = Math.floor(Math.random() * 2 ** 31);
    byId("seed").value = asked.seed;
  }
  return asked;
}

async function run() {
  if (race === null || race.running) return;
  clearBlame();
  nameDrafter(speculation.drafter.id);
  setRunning(true);
  // On a phone the panes are below the form.
  if (!WIDE.matches) byId("output").scrollIntoView({ block: "start" });
  const both = bodies({ model, ...request() }, speculation.object(), speculation.prediction);
  const how = { apart: chosen("timing") === "apart", verification: speculation.verification };
  try {
    await race.run(PATHS[chosen("mode")], both, how);
  } finally {
    setRunning(false);
  }
  for (const pane of [drafted, plain]) if (pane.failure) blame(pane.failure);
}

function setRunning(running) {
  const hadFocus = document.activeElement;
  byId("run").disabled = running;
  byId("stop").disabled = !running;
  // Focus goes from a button that is no longer of use to the one that is.
  if (hadFocus === byId("run") && running) byId("stop").focus();
  if (hadFocus === byId("stop") && !running) byId("run").focus();
  byId("output").setAttribute("aria-busy", String(running));
  engine.busy = running;
  engine.watch();
}

// Marks the field that the server blamed and says why beside it.
function blame(failure) {
  if (failure.status === 401) askForKey();
  if (!failure.param) return;
  const fields = [...document.querySelectorAll("[data-param]")];
  const fits = (field) =>
    field.dataset.param
      .split(" ")
      .some((param) => failure.param === param || failure.param.startsWith(`${param}.`));
  const field = fields.find(fits);
  if (!field || field.getAttribute("aria-invalid") === "true") return;
  field.setAttribute("aria-invalid", "true");
  const text = element("p", { className: "error", id: `${field.id}-error` }, failure.message);
  field.setAttribute("aria-errormessage", text.id);
  field.parentElement.append(text);
}

function clearBlame() {
  for (const field of document.querySelectorAll("[aria-invalid]")) {
    byId(field.getAttribute("aria-errormessage"))?.remove();
    field.removeAttribute("aria-errormessage");
    field.removeAttribute("aria-invalid");
  }
}

byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("speculative").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  load();
});
byId("stop").addEventListener("click", () => race.stop());
byId("example").addEventListener("change", (event) => fill(EXAMPLES[event.target.value]));
for (const each of document.querySelectorAll('input[name="mode"]')) {
  each.addEventListener("change", nameThePrompt);
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape") {
    race?.stop();
  }
});
byId("speculation").open = WIDE.matches;
load();
