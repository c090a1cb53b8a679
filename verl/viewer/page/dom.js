// Builds elements. Text of a run is hostile: it enters the page as text nodes only, and characters that nobody would
// see (bidi controls, zero width, unusual spaces) show their code point.

const UNSEEN = /(?![ \n\t])[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}]/gu;

const codePoint = (character) => "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

/** Text for an attribute or a canvas. */
export function plain(text) {
  return String(text).replace(UNSEEN, (character) => `[${codePoint(character)}]`);
}

/** Text as nodes; each unseen character becomes a mark with its code point. */
export function readable(text) {
  const nodes = [];
  let begin = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > begin) nodes.push(document.createTextNode(text.slice(begin, match.index)));
    const mark = document.createElement("span");
    mark.className = "code-point";
    mark.textContent = codePoint(match[0]);
    nodes.push(mark);
    begin = match.index + match[0].length;
  }
  if (begin < text.length) nodes.push(document.createTextNode(text.slice(begin)));
  return nodes;
}

/** An element: `on…` attributes are listeners, `key` names it for the focus (see `replace`), null leaves one out. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "key") element.dataset.key = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(...(child instanceof Node ? [child] : readable(String(child))));
  }
}

/** The heading of a view, which takes the focus when the view opens. */
export const heading = (text) => h("h1", { tabindex: "-1" }, text);

/** Gives an element the color of the `n`th kind: hues in steps of the golden angle, which differ for long. */
export function tint(element, n) {
  element.classList.add("kind");
  element.style.setProperty("--hue", String(Math.round(210 + n * 137.5) % 360));
  return element;
}

/** Words for screen readers alone. */
export const unseen = (text) => h("span", { class: "unseen" }, text);

export const anchor = (href, label, attributes = {}) => h("a", { href, ...attributes }, label);
export const button = (label, onclick, attributes = {}) =>
  h("button", { type: "button", onclick, ...attributes }, label);

/** A choice among `options`, [[value, label]]. */
export function select(key, value, options, choose) {
  const items = options.map(([one, label]) => h("option", { value: one, selected: one === value }, label));
  return h("select", { key, onchange: (event) => choose(event.target.value) }, items);
}

export const byKey = (element, key) => element.querySelector(`[data-key="${CSS.escape(key)}"]`);

/**
 * Replaces what `element` holds. Where all is equal the old nodes stay, for a click that has begun; else the focus and
 * the places of scrolled parts go to the new elements of the same keys.
 */
export function replace(element, ...children) {
  const fresh = document.createDocumentFragment();
  append(fresh, children);
  const old = [...element.childNodes];
  const nodes = [...fresh.childNodes];
  if (old.length === nodes.length && old.every((node, i) => node.isEqualNode(nodes[i]))) return;
  const key = element.contains(document.activeElement) && document.activeElement.dataset.key;
  const scrolled = [...element.querySelectorAll(".scroll")].filter((one) => one.scrollLeft || one.scrollTop);
  const places = scrolled.map((one) => [one.dataset.key, one.scrollLeft, one.scrollTop]);
  element.replaceChildren(fresh);
  for (const [name, left, top] of places) byKey(element, name)?.scrollTo(left, top);
  if (key) byKey(element, key)?.focus({ preventScroll: true });
}

const INTEGER = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return INTEGER.format(value);
  const size = Math.abs(value);
  return size > 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(3) : SHORT.format(value);
}

/** `columns`: {label, cell(row), sort: key of the server or null, number: bool}; `order`: {sort, descending, link}. */
export function table(caption, columns, rows, order = null) {
  const head = columns.map(({ label, sort, number: numeric }) => {
    if (!sort || !order) return h("th", { scope: "col", class: numeric && "number" }, label);
    const [direction, arrow] = order.sort !== sort ? ["none", ""]
      : order.descending ? ["descending", " ▼"] : ["ascending", " ▲"];
    const target = order.link({ sort, descending: direction === "descending" ? "0" : "1", page: null });
    return h("th", { scope: "col", class: numeric && "number", "aria-sort": direction },
      anchor(target, [label, h("span", { "aria-hidden": "true" }, arrow)], { key: `sort-${sort}` }));
  });
  const cell = (column, row) => h("td", { class: column.number && "number" }, column.cell(row));
  const body = rows.map((row) => h("tr", {}, columns.map((column) => cell(column, row))));
  const parts = [h("caption", {}, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)];
  const region = { role: "region", "aria-label": plain(caption), tabindex: "0", key: `table-${caption}` };
  return h("div", { class: "scroll", ...region }, h("table", {}, parts));
}

/** Name and value pairs; those without a value are left out. */
export function facts(pairs) {
  const present = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, present.map(fact));
}

export const fact = ([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)));

/** What stands where there is nothing to show, and what to do about it. */
export function empty(message, fix) {
  return h("div", { class: "empty" }, h("p", {}, message), fix && h("p", {}, fix));
}

const CHUNK = 100_000;

/** A long text: its first 100,000 characters, the others by buttons. `rest` is a further button, or null. */
export function longText(text, name, rest = null) {
  const box = h("div", { class: "text", tabindex: "0", role: "group", "aria-label": name, dir: "auto" });
  const buttons = h("p", { class: "buttons" });
  let shown = 0;
  const more = (size) => {
    let end = Math.min(shown + size, text.length);
    if (/[\uD800-\uDBFF]/.test(text[end - 1])) end++; // both parts of a character
    box.append(...readable(text.slice(shown, end)));
    shown = end;
    const left = text.length - shown;
    const next = left > CHUNK && button(`Show ${number(CHUNK)} more characters`, () => more(CHUNK), { key: "more" });
    replace(buttons, next, left > 0 && button(`Show all ${number(left)} left`, () => more(left)), left === 0 && rest);
  };
  more(CHUNK);
  if (!text) box.append(h("em", {}, "empty text"));
  return h("div", {}, box, buttons);
}
