// The form that edits the `speculative` object, made from what /v1/drafters reports. A field left at
// the server's default is not sent; one that could have no effect is not shown.

import { byId, element } from "./dom.js";

const DEPTHS = ["num_speculative_tokens", "min_speculative_tokens", "max_speculative_tokens"];
const LARGEST_EXACT = 2 ** 31;

export class SpeculationForm {
  constructor(form, catalogue, changed) {
    this._form = form;
    this._defaults = catalogue.defaults;
    this._told = new Map(catalogue.fields.map((each) => [each.name, each]));
    this._drafters = new Map(catalogue.data.map((each) => [each.id, each]));
    this._hues = new Map([...this._drafters.keys()].map((id, at) => [id, hue(at)]));
    this._changed = changed;
    // What was entered, by path ("tree_width", "options.n"), kept while its field is not shown.
    this._entered = new Map();
    this._build();
    // Another model's form, made later, takes the place of this one.
    form.oninput = (event) => this._note(event.target);
  }

  get drafter() {
    return this._drafters.get(this._entered.get("draft_strategy") ?? this._defaults.draft_strategy);
  }

  get hue() {
    return this._hues.get(this.drafter.id);
  }

  get verification() {
    return this._shows("verification") ? this._value("verification") : "match";
  }

  // The text of the `prediction` field, or null where the drafter takes none.
  get prediction() {
    return this.drafter.takes_prediction ? this._entered.get("prediction") || null : null;
  }

  // The object to send: what was entered in fields that are shown.
  object() {
    const made = {};
    for (const field of this._form.querySelectorAll("[data-name]")) {
      const [name, value] = [field.dataset.name, this._entered.get(field.dataset.name)];
      if (value === undefined || name === "prediction") continue;
      if (name.startsWith("options.")) (made.options ??= {})[name.slice(8)] = value;
      else made[name] = value;
    }
    return made;
  }

  reset() {
    this._entered.clear();
    this._build();
    this._changed();
  }

  summary() {
    if (this.drafter.id === "none") return "none";
    const tree = this._value("tree_strategy") === "tree" && this.drafter.drafts_trees;
    return `${this.drafter.id}, ${this._value("adaptive_depth")}${tree ? ", tree" : ""}`;
  }

  _value(name) {
    return this._entered.get(name) ?? this._defaults[name];
  }

  _shows(name) {
    return this._form.querySelector(`[data-name="${name}"]`) !== null;
  }

  _note(input) {
    const { name, kind } = input.dataset;
    if (!name) return;
    const value = read(input, kind);
    const initial = name.startsWith("options.") ? this._initial(name.slice(8)) : this._defaults[name];
    if (value === undefined || value === initial) this._entered.delete(name);
    else this._entered.set(name, value);
    // Only selects decide which other fields there are.
    if (input.tagName === "SELECT") {
      this._build();
      byId(input.id).focus();
    }
    this._changed();
  }

  // An option's value where the request says nothing.
  _initial(name) {
    const own = this.drafter.options.find((option) => option.name === name);
    const isDefault = this.drafter.id === this._defaults.draft_strategy;
    return (isDefault ? this._defaults.options[name] : undefined) ?? own?.default;
  }

  _build() {
    const drafter = this.drafter;
    for (const name of this._entered.keys()) {
      const option = name.startsWith("options.") && name.slice(8);
      if (option && !drafter.options.some((each) => each.name === option)) this._entered.delete(name);
    }
    const draft = drafter.draft && `Draft: ${drafter.draft.path}, of the method ${drafter.draft.method}.`;
    const about = [drafter.description, drafter.cost && `Cost: ${drafter.cost}`, draft];
    const choices = [...this._drafters.keys()].map((id) => [id, ""]);
    const parts = [this._select("draft_strategy", "Drafter", choices, about.filter(Boolean).join(" "))];
    if (drafter.id !== "none") parts.push(...this._depthFields(), ...this._shapeFields());
    if (drafter.takes_prediction) parts.push(this._predictionField());
    if (drafter.options.length) {
      const options = drafter.options.map((option) => this._option(option));
      const legend = element("legend", {}, `Options of ${drafter.id}`);
      parts.push(element("fieldset", { className: "options" }, legend, ...options));
    }
    const reset = element("button", { type: "button", id: "reset" }, "Back to the server's defaults");
    reset.addEventListener("click", () => {
      this.reset();
      byId("reset").focus();
    });
    this._form.replaceChildren(...parts, reset);
  }

  _depthFields() {
    const policies = this._told.get("adaptive_depth").choices;
    const { fields: read } = policies.find((each) => each.id === this._value("adaptive_depth"));
    const names = DEPTHS.filter((name) => read.includes(name));
    const fields = [
      this._choice("adaptive_depth", "Policy"),
      element("div", { className: "row three" }, ...names.map((name) => this._number(name))),
    ];
    if (read.includes("target_acceptance_rate")) fields.push(this._number("target_acceptance_rate"));
    return fields;
  }

  _shapeFields() {
    const fields = [];
    if (this.drafter.drafts_trees) {
      fields.push(this._choice("tree_strategy", "Draft shape"));
      if (this._value("tree_strategy") === "tree") {
        const sizes = [this._number("tree_width"), this._number("tree_depth")];
        fields.push(element("div", { className: "row two" }, ...sizes));
      }
    }
    if (this.drafter.draws) fields.push(this._choice("verification", "Verification"));
    return fields;
  }

  _select(name, label, choices, help) {
    const input = element("select");
    for (const [id, text] of choices) {
      const isDefault = id === this._defaults[name] ? " (default)" : "";
      const words = text ? `${id}: ${text}${isDefault}` : `${id}${isDefault}`;
      input.append(element("option", { value: id }, words));
    }
    input.value = this._value(name);
    return this._field(name, label, input, "text", help);
  }

  _choice(name, label) {
    const choices = this._told.get(name).choices.map((each) => [each.id, each.description]);
    return this._select(name, label, choices);
  }

  _number(name) {
    const { minimum: low, maximum: high, description } = this._told.get(name);
    const given = this._entered.get(name);
    const input = element("input", { type: "number", min: low, max: high, step: "any" });
    input.value = given ?? "";
    input.placeholder = this._defaults[name] ?? "none";
    const label = name.replaceAll("_", " ").replace("speculative tokens", "drafts");
    return this._field(name, label, input, "number", `${description} ${low} to ${high}.`);
  }

  _predictionField() {
    const input = element("textarea", { rows: 4, spellcheck: false });
    input.value = this._entered.get("prediction") ?? "";
    const help = "What the output is expected to be, for the most part.";
    return this._field("prediction", "Prediction", input, "text", help);
  }

  _option(option) {
    const name = `options.${option.name}`;
    const initial = this._initial(option.name);
    const value = this._entered.get(name) ?? initial;
    const kind = typeof option.default;
    const input = element("input", { type: { boolean: "checkbox", number: "number" }[kind] ?? "text" });
    if (kind === "boolean") input.checked = value;
    else input.value = value;
    let range = "";
    if (kind === "number") {
      input.step = "any";
      if (option.minimum !== null) input.min = option.minimum;
      if (option.maximum !== null) input.max = option.maximum;
      if (option.minimum !== null && option.maximum !== null && option.maximum < LARGEST_EXACT) {
        range = ` ${option.minimum} to ${option.maximum}.`;
      }
    }
    const help = `${option.description}${range} Default: ${initial}.`;
    return this._field(name, option.name.replaceAll("_", " "), input, kind, help);
  }

  _field(name, label, input, kind, help) {
    input.id = `speculative-${name.replace(".", "-")}`;
    Object.assign(input.dataset, { name, kind, param: paramOf(name) });
    const tag = element("label", { htmlFor: input.id }, capital(label));
    const field = element("div", { className: input.type === "checkbox" ? "field check" : "field" });
    field.append(...(input.type === "checkbox" ? [input, tag] : [tag, input]));
    if (help) {
      const text = element("p", { className: "help", id: `${input.id}-help` }, help);
      input.setAttribute("aria-describedby", text.id);
      field.append(text);
    }
    return field;
  }
}

function paramOf(name) {
  return name === "prediction" ? "prediction prediction.content" : `speculative.${name}`;
}

function read(input, kind) {
  if (kind === "boolean") return input.checked;
  if (input.value === "") return undefined;
  return kind === "number" ? Number(input.value) : input.value;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

// Far apart for neighbours in the list, however long it is: steps of the golden ratio, between the
// hues that stand for errors.
const hue = (at) => Math.round(60 + 280 * ((0.83 + 0.618 * at) % 1));
