// The server, as the page sees it. Every failure becomes a Failure whose message can be shown as it is.

const KEY_NAME = "slipstream.key";

export class Failure extends Error {
  // param: the dotted path of the field to blame, or null.
  constructor(message, { param = null, status = 0 } = {}) {
    super(message);
    this.param = param;
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

export const hasKey = () => sessionStorage.getItem(KEY_NAME) !== null;

function headers() {
  const key = sessionStorage.getItem(KEY_NAME);
  // No header can hold other characters, so no server has such a key.
  return key && /^[\x21-\x7e]+$/.test(key) ? { authorization: `Bearer ${key}` } : {};
}

async function call(path, init = {}) {
  let response;
  try {
    response = await fetch(path, { ...init, headers: { ...headers(), ...init.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const status = response.status;
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // Not the server's own answer: a proxy's, perhaps.
  }
  const wait = response.headers.get("retry-after");
  let message = told.message ?? `The server answered with status ${status}.`;
  if (status === 429 && wait) message += ` Try again in ${wait} s.`;
  return new Failure(named(message, told.param), { param: told.param ?? null, status });
}

// The field's name belongs into the sentence; most of the server's messages have it already.
function named(message, param) {
  return param && !message.includes(param) ? `${param}: ${message}` : message;
}

export async function getJson(path) {
  return (await call(path)).json();
}

// Prometheus' text as a map from "name{labels}" to number.
export async function getMetrics() {
  const text = await (await call("metrics")).text();
  const values = new Map();
  for (const line of text.split("\n")) {
    const cut = line.lastIndexOf(" ");
    if (line && !line.startsWith("#")) values.set(line.slice(0, cut), Number(line.slice(cut + 1)));
  }
  return values;
}

// Posts the body and yields the chunks of the reply. A stream that breaks off throws a Failure.
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw lost();
    }
    if (part.done) throw lost();
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(named(chunk.error.message, chunk.error.param));
      yield chunk;
    }
  }
}

function lost() {
  return new Failure("The connection to the server was lost.");
}
