// Small things that every part of the page needs.

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

export const times = (ratio) => `${ratio.toFixed(ratio < 9.95 ? 1 : 0)}×`;

export const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
