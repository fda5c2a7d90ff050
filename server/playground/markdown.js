// Markdown as elements, and nothing but what is made here: the text never becomes HTML. Headings, lists,
// quotations, tables, code, emphasis and links to the web; the rest stays the text that it is.
//
// `paint(start, end)` gives the nodes of a stretch of the source: who renders may mark parts of it.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(?=\S)/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const ROW = /^\s*\|.*\|\s*$/;
const DIVISION = /^\s*\|(?:\s*:?-+:?\s*\|)+\s*$/;
// Quotations and lists in each other, so that no text is too much for the browser; what lies deeper is text.
const MOST_NESTED = 24;
const CELL = /(?:\\.|[^|\\])+/g;
// Bounded, so that a text of asterisks only takes no time to speak of.
const INLINE = new RegExp(
  [
    "\\\\(?<escaped>[!-/:-@[-`{-~])",
    "(?<ticks>`+)(?<code>[^`]|[^`][^]{0,999}?[^`])\\k<ticks>(?!`)",
    // Not __this__: models mean names of Python by it.
    "(?<strong>\\*\\*(?=\\S)[^]{0,999}?\\S\\*\\*)",
    "(?<em>\\*(?=[^\\s*])[^*]{0,999}?(?<=\\S)\\*(?!\\*)|(?<!\\w)_(?=[^\\s_])[^_]{0,999}?(?<=\\S)_(?!\\w))",
    "(?<del>~~(?=\\S)[^]{0,999}?\\S~~)",
    "!?\\[(?<label>[^\\]\\n]{1,999})\\]\\((?<link>(?:https?://|mailto:)[^\\s()]{1,1999})(?: \"[^\"\\n]{0,999}\")?\\)",
    "(?<url>https?://[^\\s<>()\\[\\]]{0,1999}[^\\s<>()\\[\\].,;:!?'\"*_`])",
  ].join("|"),
  "g",
);

export function markdown(source, paint) {
  const lines = [];
  for (let at = 0; at <= source.length; ) {
    const end = source.indexOf("\n", at);
    const stop = end < 0 ? source.length : end;
    lines.push({ text: source.slice(at, stop), at });
    at = stop + 1;
  }
  return new Renderer(paint).blocks(lines);
}

class Renderer {
  constructor(paint) {
    this._paint = paint;
    // No level of headings is left out, whatever the text does.
    this._level = 2;
    this._depth = 0;
  }

  blocks(lines) {
    const made = [];
    let at = 0;
    this._depth += 1;
    while (at < lines.length) {
      const [node, used] = this._block(lines, at);
      if (node) made.push(node);
      at += used;
    }
    this._depth -= 1;
    return made;
  }

  // The block that begins there, or null, and how many lines it has.
  _block(lines, at) {
    const { text } = lines[at];
    if (!text.trim()) return [null, 1];
    if (FENCE.test(text)) return this._fenced(lines, at);
    if (RULE.test(text)) return [element("hr"), 1];
    if (HEADING.test(text)) return [this._heading(lines[at]), 1];
    const mayNest = this._depth <= MOST_NESTED;
    if (mayNest && QUOTE.test(text)) return this._quote(lines, at);
    if (mayNest && ITEM.test(text)) return this._list(lines, at);
    if (ROW.test(text) && DIVISION.test(lines[at + 1]?.text ?? "")) return this._table(lines, at);
    const used = extent(lines, at + 1, (line) => !begins(line));
    return [element("p", {}, ...this._inline(lines.slice(at, at + 1 + used))), 1 + used];
  }

  _fenced(lines, at) {
    const [, fence, language] = FENCE.exec(lines[at].text);
    const isEnd = ({ text }) => text.trim().startsWith(fence) && !text.trim().replaceAll(fence[0], "");
    const used = extent(lines, at + 1, (line) => !isEnd(line));
    const code = element("code", {}, ...this._plain(lines.slice(at + 1, at + 1 + used)));
    const box = element("pre", { tabIndex: 0 }, code);
    if (language) box.dataset.language = language;
    return [box, Math.min(used + 2, lines.length - at)];
  }

  _heading(line) {
    const marks = HEADING.exec(line.text);
    this._level = Math.min(marks[1].length + 2, this._level + 1, 6);
    const content = strip(line, marks[0].length);
    content.text = content.text.replace(/\s+#+\s*$/, "");
    return element(`h${this._level}`, {}, ...this._inline([content]));
  }

  _quote(lines, at) {
    const used = extent(lines, at, ({ text }) => QUOTE.test(text));
    const inner = lines.slice(at, at + used).map((line) => strip(line, QUOTE.exec(line.text)[0].length));
    return [element("blockquote", {}, ...this.blocks(inner)), used];
  }

  _list(lines, at) {
    const [, indent, mark] = ITEM.exec(lines[at].text);
    const isNumbered = /\d/.test(mark);
    const list = element(isNumbered ? "ol" : "ul");
    if (isNumbered) list.start = Number.parseInt(mark, 10);
    let end = at;
    while (end < lines.length) {
      const found = ITEM.exec(lines[end].text);
      if (!found || RULE.test(lines[end].text) || found[1].length > indent.length + 1) break;
      if (/\d/.test(found[2]) !== isNumbered || found[1].length < indent.length) break;
      const depth = found[0].length;
      // What is indented belongs to the item; so does a line that goes on with its paragraph.
      let used = 1;
      while (end + used < lines.length) {
        const { text } = lines[end + used];
        const blank = !text.trim();
        const within = /^ */.exec(text)[0].length > found[1].length;
        const goesOn = !begins(lines[end + used]) && lines[end + used - 1].text.trim();
        if (blank ? !isWithin(lines, end + used, found[1].length) : !(within || goesOn)) break;
        used += 1;
      }
      const inner = lines.slice(end, end + used).map((line, number) => {
        const spaces = /^ */.exec(line.text)[0].length;
        return strip(line, number === 0 ? depth : Math.min(spaces, depth));
      });
      list.append(element("li", {}, ...unwrapped(this.blocks(inner))));
      end += used;
      // Items may have blank lines between them.
      const next = extent(lines, end, ({ text }) => !text.trim());
      if (next && ITEM.test(lines[end + next]?.text ?? "")) end += next;
    }
    return [list, end - at];
  }

  _table(lines, at) {
    const rows = extent(lines, at + 2, ({ text }) => ROW.test(text));
    const head = element("tr", {}, ...this._cells(lines[at], "th"));
    const body = lines.slice(at + 2, at + 2 + rows).map((line) => element("tr", {}, ...this._cells(line, "td")));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
    const box = element("div", { className: "table", tabIndex: 0 }, table);
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Table");
    return [box, rows + 2];
  }

  _cells(line, name) {
    const first = line.text.indexOf("|") + 1;
    const inner = line.text.slice(first, line.text.lastIndexOf("|"));
    return [...inner.matchAll(CELL)].map((cell) => {
      const spaces = cell[0].length - cell[0].trimStart().length;
      const content = { text: cell[0].trim(), at: line.at + first + cell.index + spaces };
      return element(name, {}, ...this._inline([content]));
    });
  }

  // Lines as they are, with their ends.
  _plain(lines) {
    return lines.flatMap(({ text, at }) => [...this._paint(at, at + text.length), "\n"]);
  }

  _inline(lines) {
    const joined = lines.map(({ text }) => text.trimEnd()).join("\n");
    let begin = 0;
    const starts = lines.map(({ text, at }) => {
      const start = { begin, at };
      begin += text.trimEnd().length + 1;
      return start;
    });
    const place = (position) => {
      const start = starts.findLast((each) => each.begin <= position);
      return start.at + position - start.begin;
    };
    const written = (from, to) => {
      const nodes = [];
      for (let at = from; at < to; ) {
        const found = joined.indexOf("\n", at);
        const stop = found < 0 || found > to ? to : found;
        if (stop > at) nodes.push(...this._paint(place(at), place(at) + stop - at));
        if (stop < to) nodes.push(element("br"));
        at = stop + 1;
      }
      return nodes;
    };
    return inline(joined, 0, joined.length, written);
  }
}

function inline(text, from, to, written) {
  const nodes = [];
  let done = from;
  const pattern = new RegExp(INLINE);
  const part = text.slice(0, to);
  pattern.lastIndex = from;
  for (let found; (found = pattern.exec(part)); ) {
    const [at, end] = [found.index, found.index + found[0].length];
    nodes.push(...written(done, at), span(found, at, end));
    done = end;
  }
  return [...nodes, ...written(done, to)];

  function span({ groups, 0: whole }, at, end) {
    if (groups.escaped) return element("span", {}, ...written(at + 1, end));
    if (groups.ticks) {
      const wide = groups.ticks.length;
      return element("code", {}, ...written(at + wide, end - wide));
    }
    if (groups.url) return link(groups.url, written(at, end));
    if (groups.link) {
      const begin = at + whole.indexOf("[") + 1;
      return link(groups.link, inline(text, begin, begin + groups.label.length, written));
    }
    const [name, wide] = groups.strong ? ["strong", 2] : groups.em ? ["em", 1] : ["del", 2];
    return element(name, {}, ...inline(text, at + wide, end - wide, written));
  }
}

function link(href, children) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

const strip = ({ text, at }, number) => ({ text: text.slice(number), at: at + number });

// How many lines from there on are such.
function extent(lines, at, fits) {
  let number = 0;
  while (at + number < lines.length && fits(lines[at + number])) number += 1;
  return number;
}

// Whether a line ends the paragraph before it.
function begins({ text }) {
  return !text.trim() || [FENCE, RULE, HEADING, QUOTE, ITEM, ROW].some((each) => each.test(text));
}

// Whether what follows blank lines is indented deeper than so many spaces.
function isWithin(lines, at, indent) {
  const next = lines.slice(at).find(({ text }) => text.trim());
  return next !== undefined && /^ */.exec(next.text)[0].length > indent;
}

// An item's first paragraph needs no box of its own.
function unwrapped(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}
