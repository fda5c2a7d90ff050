// A request as others would send it. None of them holds the key: it is read from the environment.

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };
// What the Python client knows; it sends the rest as it is.
const KNOWN = [
  ...["model", "messages", "prompt", "max_tokens", "temperature", "seed"],
  ...["response_format", "tools", "tool_choice", "prediction"],
];

// kind: "chat" or "completion". body: without what is for streams only.
export const SNIPPETS = {
  curl({ base, kind, body, needsKey }) {
    const key = needsKey ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
    return `curl ${base}${PATHS[kind]} \\\n  -H "Content-Type: application/json"${key} \\\n  -d ${quoted(json(body))}`;
  },

  Python({ base, kind, body, needsKey }) {
    const known = KNOWN.filter((name) => name in body);
    const others = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.includes(name)));
    const lines = known.map((name) => `    ${name}=${python(body[name], 4)},`);
    if (Object.keys(others).length) lines.push(`    extra_body=${python(others, 4)},`);
    const key = needsKey ? 'os.environ["API_KEY"]' : '"unused"';
    const [method, text] =
      kind === "chat" ? ["chat.completions", "message"] : ["completions", "text"];
    return [
      ...(needsKey ? ["import os", ""] : []),
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url="${base}v1", api_key=${key})`,
      `reply = client.${method}.create(`,
      ...lines,
      ")",
      `print(reply.choices[0].${text}${kind === "chat" && !body.tools ? ".content" : ""})`,
    ].join("\n");
  },

  JavaScript({ base, kind, body, needsKey }) {
    const key = needsKey ? "\n    authorization: `Bearer ${process.env.API_KEY}`," : "";
    const text = kind === "chat" ? `message${body.tools ? "" : ".content"}` : "text";
    return `const response = await fetch("${base}${PATHS[kind]}", {
  method: "POST",
  headers: {
    "content-type": "application/json",${key}
  },
  body: JSON.stringify(${json(body).replaceAll("\n", "\n  ")}),
});
const reply = await response.json();
console.log(reply.choices[0].${text});`;
  },

  JSON: ({ body }) => json(body),
};

const json = (value) => JSON.stringify(value, null, 2);

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

// A value as Python writes it; JSON's texts and numbers are Python's too.
function python(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = " ".repeat(indent + 4);
  const lines = Array.isArray(value)
    ? value.map((each) => `${inner}${python(each, indent + 4)},\n`)
    : Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${python(each, indent + 4)},\n`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return lines.length ? `${open}\n${lines.join("")}${" ".repeat(indent)}${close}` : `${open}${close}`;
}
