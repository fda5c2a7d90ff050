// What a request has beside its prompt: the fields that the race and the conversation share.

import { Failure } from "./api.js";
import { byId } from "./dom.js";

const NUMBERS = ["max-tokens", "temperature", "seed"];

const SCHEMA = {
  type: "object",
  properties: {
    title: { type: "string" },
    tips: { type: "array", items: { type: "string" }, minItems: 2, maxItems: 4 },
  },
  required: ["title", "tips"],
};

const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  },
];

// Each view's numbers, as texts, while the other one is shown.
const kept = new Map([["conversation", ["", "", ""]]]);

export function swapNumbers(from, to) {
  kept.set(from, NUMBERS.map((id) => byId(id).value));
  kept.get(to)?.forEach((value, at) => (byId(NUMBERS[at]).value = value));
}

// Fields that are empty are the server's to choose: it says what they are then.
export function setDefaults(card) {
  byId("max-tokens").max = card.max_model_len;
  byId("max-tokens").placeholder = "no limit";
  byId("temperature").placeholder = String(card.default_sampling_params.temperature);
  byId("seed").placeholder = "any";
}

export function numbers() {
  const filled = NUMBERS.filter((id) => byId(id).value !== "");
  return Object.fromEntries(filled.map((id) => [id.replace("-", "_"), Number(byId(id).value)]));
}

// The schema, and for chats the tools, one of which the model may have to call; throws a Failure for what
// is no JSON.
export function shape(isChat, mayHaveTo = true) {
  const [schema, tools] = [parsed("schema", "response_format"), parsed("tools", "tools")];
  const made = {};
  if (schema !== null) made.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools !== null && isChat) {
    made.tools = tools;
    if (mayHaveTo && byId("must-call").checked) made.tool_choice = "required";
  }
  return made;
}

function parsed(id, param) {
  const text = byId(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Failure(`This is no JSON: ${error.message}`, { param });
  }
}

for (const [id, example] of [["schema", SCHEMA], ["tools", TOOLS]]) {
  byId(`${id}-example`).addEventListener("click", () => {
    byId(id).value = JSON.stringify(example, null, 2);
    byId(id).dispatchEvent(new Event("input", { bubbles: true }));
  });
}
byId("shape").addEventListener("input", () => {
  const given = ["schema", "tools"].filter((id) => byId(id).value.trim());
  byId("shape-summary").textContent = given.join(" and ");
});
