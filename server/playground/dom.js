// Small things that every part of the page needs.

const SHORTEST_TIMED_MS = 20;

export const byId = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Fills a <dl> with named figures once; gives a function that sets them by name.
export function figures(list, names) {
  const values = new Map();
  for (const [key, label, title] of names) {
    const value = element("dd", {}, "–");
    values.set(key, value);
    list.append(element("div", { title: title ?? "" }, element("dt", {}, label), value));
  }
  return (key, text) => {
    const value = values.get(key);
    if (value.textContent !== text) value.textContent = text;
  };
}

export const fixed = (value, digits) =>
  value === null || !Number.isFinite(value) ? "–" : value.toFixed(digits);

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

export const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;

// Tokens per second; null for what was too short to be timed.
export const speed = (number, ms) => (number > 0 && ms >= SHORTEST_TIMED_MS ? (1000 * number) / ms : null);

export const times = (ratio) => `${ratio.toFixed(ratio < 9.95 ? 1 : 0)}×`;

export const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

// A button that copies what `text` gives; `tell` says so to who cannot see it.
export function copyButton(text, tell) {
  const button = element("button", { type: "button", className: "small" }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Not allowed";
    tell(copied ? "Copied." : "The browser does not let the page copy.");
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that came over plain HTTP from another machine have no clipboard of their own.
    const focused = document.activeElement;
    const box = element("textarea", { value: text, className: "visually-hidden" });
    document.body.append(box);
    box.select();
    const copied = document.execCommand("copy");
    box.remove();
    focused?.focus();
    return copied;
  }
}
