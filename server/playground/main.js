// Puts the page together: its two views, the request's form, its code, the engine.

import { Failure, getJson, hasKey, setKey } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, copyButton, element } from "./dom.js";
import { EnginePanel } from "./engine.js";
import { EXAMPLES } from "./examples.js";
import { FIGURES, Pane } from "./pane.js";
import { numbers, setDefaults, shape, swapNumbers } from "./request.js";
import { bodies, Race } from "./run.js";
import { SNIPPETS } from "./snippets.js";
import { SpeculationForm } from "./speculation.js";

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };
const VIEWS = ["race", "conversation"];
const VIEW_NAME = "slipstream.view";
const WIDE = matchMedia("(min-width: 60rem)");

const drafted = new Pane(byId("drafted"), "With drafts");
const plain = new Pane(byId("plain"), "Without drafts");
plain.name("Without drafts", "One token in every step.");
const engine = new EnginePanel();
let speculation = null;
let race = null;
let view = "race";
const conversation = new Conversation({
  request: asking,
  changed: () => showCode(),
  busy: (busy) => {
    if (busy) clearBlame();
    engine.busy = busy;
  },
  refused: blame,
});

let newestLoad = 0;

async function load() {
  const thisLoad = (newestLoad += 1);
  try {
    // Of several models the one that the page's address names, else the first; asking for its drafters
    // loads it, and only then does its card say all.
    const first = (await getJson("v1/models")).data[0];
    const name = new URLSearchParams(location.search).get("model") ?? first.id;
    const catalogue = await getJson(`v1/drafters?model=${encodeURIComponent(name)}`);
    const cards = (await getJson("v1/models")).data;
    const named = cards.find((each) => each.id === name) ?? first;
    // Metrics and examples know an adapter's model, not the adapter.
    const card = cards.find((each) => each.id === named.parent) ?? named;
    if (thisLoad !== newestLoad) return;
    byId("key-form").hidden = true;
    byId("notice").hidden = true;
    if (engine.model !== card.id) setUp(card, catalogue);
    offerModels(cards, named.id);
    showView();
    // Not before it is complete: what is filled in later would move.
    byId("main").hidden = false;
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
  engine.model = card.id;
  byId("model").textContent = byId("model").title = describe(card);
  const chats = (conversation.enabled = card.has_chat_template);
  byId("message").disabled = byId("send").disabled = !chats;
  if (!chats) byId("nothing-said").textContent = "The model has no chat template, so it holds no conversations.";
  radio("mode", "chat").disabled = !chats;
  radio("mode", "chat").parentElement.title = chats ? "" : "The model has no chat template.";
  setDefaults(card);
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
}

function offerModels(cards, chosen) {
  const name = ({ id, parent }) => (parent ? `${id} (adapter)` : id);
  byId("model-name").replaceChildren(
    ...cards.map((each) => element("option", { value: each.id }, name(each))),
  );
  byId("model-name").value = chosen;
  byId("model-field").hidden = cards.length < 2;
}

function showView() {
  const asked = location.hash.slice(1) || sessionStorage.getItem(VIEW_NAME);
  const next = VIEWS.includes(asked) ? asked : view;
  if (next !== view) swapNumbers(view, next);
  view = next;
  sessionStorage.setItem(VIEW_NAME, view);
  for (const each of VIEWS) {
    document.querySelectorAll(`.in-${each}`).forEach((part) => (part.hidden = each !== view));
    byId("views").querySelector(`[href="#${each}"]`).ariaCurrent = each === view ? "page" : null;
  }
  byId("main").dataset.view = view;
  // What is read first comes first: a race's request, but a conversation's turns.
  if (view === "race") byId("main").prepend(byId("ask"));
  else byId("main").append(byId("ask"));
  showCode();
}

function describe(card) {
  const size = card.num_parameters >= 1e9 ? card.num_parameters / 1e9 : card.num_parameters / 1e6;
  const unit = card.num_parameters >= 1e9 ? "B" : "M";
  const weights = card.quantization ? quantized(card.quantization, card.dtype) : card.dtype;
  const parts = [card.id, `${size.toFixed(1)} ${unit} parameters`, weights, card.determinism];
  return parts.join(" · ");
}

// How most weights are held and what they are multiplied with, and what the others are.
function quantized({ method, schemes, bits, activation_bits: inputs, num_quantized: some, num_parameters: all }, dtype) {
  const types = method === "gguf" ? ` ${Object.keys(schemes).slice(0, 3).join(", ")}` : "";
  const share = Math.floor((100 * some) / all);
  const rest = share < 99 ? ` for ${share} % of the weights, ${dtype} for the others` : "";
  return `${method}${types}: ${+bits.toFixed(2)} bits per weight, ${inputs} per input${rest}`;
}

function fill(example) {
  if (view !== "race") swapNumbers(view, "race");
  radio("mode", example.mode).checked = true;
  byId("prompt").value = example.text;
  byId("max-tokens").value = example.maxTokens;
  byId("temperature").value = example.temperature;
  if (view !== "race") swapNumbers("race", view);
  nameThePrompt();
}

function radio(name, value) {
  return document.querySelector(`input[name="${name}"][value="${value}"]`);
}

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

function nameThePrompt() {
  byId("prompt-label").textContent = chosen("mode") === "chat" ? "Message" : "Prompt";
}

// What the speculation form says shows in the summary, the code, the legends and the pane's title.
function showSpeculation() {
  const id = speculation.drafter.id;
  byId("speculation-summary").textContent = speculation.summary();
  showCode();
  if (!race?.running) nameDrafter(id);
}

function nameDrafter(id) {
  const none = id === "none";
  document.documentElement.style.setProperty("--hue", String(speculation.hue));
  const caption = "Drafts in each step: checked (outline), accepted (filled).";
  drafted.name(none ? "Drafter none" : `With drafts by ${id}`, none ? "One token in every step." : caption);
  const swatch = element("span", { className: "drafted" }, "marked tokens");
  for (const legend of document.querySelectorAll("[data-legend]")) {
    const swatch = element("span", { className: "drafted" }, "Marked tokens");
    legend.replaceChildren(
      ...(none
        ? ["Nothing is drafted: choose a drafter under Speculation."]
        : [swatch, ` were guessed by ${id} and confirmed by the model; the model wrote the others.`]),
    );
  }
}

// The prompt or the messages of the race, by the endpoint's name for them.
function prompt() {
  const text = byId("prompt").value;
  return chosen("mode") === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
}

// What drafts are to be: the speculative object, and the prediction where there is one.
function guesses() {
  const { prediction } = speculation;
  return {
    speculative: { ...speculation.object(), return_drafted: true },
    ...(prediction !== null && { prediction: { type: "content", content: prediction } }),
  };
}

// What both of a race's requests have; throws a Failure.
function request() {
  return { model: byId("model-name").value, ...prompt(), ...numbers(), ...shape(chosen("mode") === "chat") };
}

// A conversation's request. After a tool's result the model need not call another.
function asking(messages) {
  const mayHaveTo = messages.at(-1)?.role !== "tool";
  return { model: byId("model-name").value, messages, ...numbers(), ...shape(true, mayHaveTo), ...guesses() };
}

function showCode() {
  const box = byId("snippet");
  if (!byId("code").open || speculation === null) return;
  const kind = view === "race" ? chosen("mode") : "chat";
  const messages = conversation.messages({ draft: true });
  try {
    const body =
      view === "race" ? { ...request(), ...guesses() } : asking(messages);
    const base = new URL(".", location.href).href;
    box.textContent = SNIPPETS[byId("language").value]({ base, kind, body, needsKey: hasKey() });
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    box.textContent = error.message;
  }
}

async function run() {
  if (race === null || race.running) return;
  clearBlame();
  let asked;
  try {
    asked = request();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    blame(error);
    return;
  }
  if (asked.seed === undefined) {
    // Both panes need the same one, so it is chosen here.
    byId("seed").value = asked.seed = Math.floor(Math.random() * 2 ** 31);
  }
  nameDrafter(speculation.drafter.id);
  setRunning(true);
  // On a phone the panes are below the form.
  if (!WIDE.matches) byId("output").scrollIntoView({ block: "start" });
  const both = bodies(asked, guesses());
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
  const folded = field.closest("details");
  if (folded) folded.open = true;
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
byId("example").addEventListener("change", (event) => {
  fill(EXAMPLES[event.target.value]);
  showCode();
});
for (const each of document.querySelectorAll('input[name="mode"]')) {
  each.addEventListener("change", () => {
    nameThePrompt();
    showCode();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (view === "race") run();
    else conversation.send();
  } else if (event.key === "Escape") {
    if (view === "race") race?.stop();
    else conversation.stop();
  }
});
byId("model-name").addEventListener("change", ({ target }) => {
  // Of another model the rest is to be asked for, too; it is in the address, so that it can be shared.
  const address = new URL(location.href);
  address.searchParams.set("model", target.value);
  history.replaceState(null, "", address);
  load();
});
addEventListener("hashchange", showView);
byId("language").append(...Object.keys(SNIPPETS).map((name) => element("option", {}, name)));
byId("language").after(copyButton(() => byId("snippet").textContent, (text) => (byId("said").textContent = text)));
for (const kind of ["toggle", "input", "change"]) byId("code").addEventListener(kind, showCode);
byId("main").addEventListener("input", showCode);
byId("words").append(
  ...FIGURES.map(([, label, meaning]) => element("div", {}, element("dt", {}, label), element("dd", {}, meaning))),
);
byId("speculation").open = WIDE.matches;
load();
