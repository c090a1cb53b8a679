// The tokens of a response, colored by one of their numbers. Exact values of the token at the mouse or at the
// keyboard's place stand below. Colors are shares of one tone, for a text of full contrast; pages of 4,000 tokens keep
// long responses usable.

import { button, fact, h, number, readable, replace, tint } from "./dom.js";

const PAGE = 4000;
const LOG_PROB = { low: "likely", high: "unlikely", amount: (value) => -value, negated: true };

/** Numbers of a token. `amount` turns a value into what the color shows; `kinds` names the colors instead. */
const MEASURES = {
  log_prob: { label: "Sampler log-prob", ...LOG_PROB },
  trainer_log_prob: { label: "Trainer log-prob", ...LOG_PROB },
  ratio: { label: "Ratio", low: "below 1", high: "above 1", amount: (value) => Math.log(Math.max(value, 1e-9)),
    signed: true },
  advantage: { label: "Advantage", low: "negative", high: "positive", amount: (value) => value, signed: true },
  entropy: { label: "Entropy", low: "certain", high: "uncertain", amount: (value) => value },
  difference: { label: "Sampler − trainer", low: "sampler lower", high: "sampler higher", amount: (value) => value,
    signed: true },
  mask: { label: "Mask", kinds: (value) => (value ? "in the loss" : "not in the loss") },
  version: { label: "Version", kinds: (value) => `version ${value}` },
};

/** The 99th percentile of the absolute amounts: one extreme token does not pale all others. */
function largestOf(values, amount) {
  const sizes = values.filter((value) => value !== null).map((value) => Math.abs(amount(value))).sort((a, b) => a - b);
  return sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.99))] || 1;
}

function paintShare(element, share) {
  element.className = `token ${share < 0 ? "low" : "high"}`;
  element.style.setProperty("--share", `${Math.round(Math.abs(share) * 100)}%`);
  return element;
}

function kindPainter(name, values) {
  const present = [...new Set(values)].filter((value) => value !== null).sort((a, b) => a - b);
  const paint = (element, value) => {
    element.className = "token";
    return value === null ? element : tint(element, name === "mask" ? value : present.indexOf(value));
  };
  const legend = present.slice(0, 12).map((value) => paint(h("span", {}, MEASURES[name].kinds(value)), value));
  return { legend, paint };
}

/** {paint(element, value), legend: elements} of a measure over the values of one sample. */
function painter(name, values) {
  const { amount, kinds, low, high, signed, negated } = MEASURES[name];
  if (kinds) return kindPainter(name, values);
  const largest = largestOf(values, amount);
  const paint = (element, value) => paintShare(element, value === null ? 0 : clamp(amount(value) / largest, -1, 1));
  const mark = (text, share) => paintShare(h("span", {}, text), share);
  const edge = (sign) => number(name === "ratio" ? Math.exp(sign * largest) : negated ? -largest : sign * largest);
  const middle = name === "ratio" ? "1" : "0";
  const top = mark(`${high}, ${edge(1)} and ${negated ? "less" : "more"}`, 1);
  const bottom = signed ? [mark(`${low}, ${edge(-1)} and less`, -1), mark(middle, 0)] : [mark(`${low}, 0`, 0)];
  return { legend: [...bottom, top], paint };
}

const clamp = (value, least, most) => Math.max(least, Math.min(most, value));

/** All digits that a 32-bit number has. */
function exact(value) {
  return typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(8)) : (value ?? null);
}

function described(tokens, i) {
  const values = Object.entries(MEASURES).map(([name, { label }]) => [label, exact(tokens[name]?.[i])]);
  const token = [["Text", JSON.stringify(tokens.text[i])], ["Id", exact(tokens.ids?.[i])], ...values];
  return [["Token", `${i + 1} of ${tokens.text.length}`], ...token].filter(([, value]) => value !== null);
}

/** `measure` and `place` come from the link; `remember` writes them into it. */
export function tokenView(values, { measure, place, remember }) {
  const isOfTrainer = values.trainer_log_prob && !values.difference; // then the server sends it as `log_prob`, too
  const tokens = isOfTrainer ? { ...values, log_prob: null } : values;
  const count = tokens.text.length;
  const has = (name) => tokens[name]?.some((value) => value !== null);
  const known = has(measure) ? measure : Object.keys(MEASURES).find(has);
  const state = { measure: known, place: clamp(place, 0, count - 1) };
  const choice = h("div", { class: "buttons", role: "group", "aria-label": "Color tokens by" });
  const legend = h("p", { class: "legend" });
  const readout = h("dl", { class: "facts readout", "aria-live": "polite" });
  const pages = h("p", { class: "buttons" });
  const text = h("div", { class: "text tokens", tabindex: "0", role: "group", key: "tokens",
    "aria-label": "Tokens; arrow keys move from token to token, the values stand below" });
  const first = () => Math.floor(state.place / PAGE) * PAGE;

  function color(name) {
    state.measure = name;
    remember({ color: name });
    paint();
  }
  function paint() {
    const values = tokens[state.measure] ?? [];
    const painted = painter(state.measure ?? "mask", values);
    [...text.children].forEach((element, i) => painted.paint(element, values[first() + i] ?? null));
    replace(legend, painted.legend);
    const look = (name) => ({ key: `by-${name}`, "aria-pressed": String(name === state.measure), disabled: !has(name),
      title: !has(name) && "not recorded" });
    replace(choice, Object.entries(MEASURES).map(([name, { label }]) => button(label, () => color(name), look(name))));
    mark(state.place, false);
  }
  function fill() {
    const end = Math.min(first() + PAGE, count);
    text.replaceChildren(...tokens.text.slice(first(), end).map((token) => {
      const element = document.createElement("span");
      element.append(...readable(token));
      return element;
    }));
    const to = (target, label) => target >= 0 && target < count && button(label, () => go(target), { key: label });
    replace(pages, count > PAGE && [`Tokens ${number(first() + 1)} to ${number(end)} of ${number(count)}`,
      to(first() - PAGE, "Tokens before"), to(first() + PAGE, "Tokens after")]);
    paint();
  }
  function go(target) {
    const before = first();
    state.place = clamp(target, 0, count - 1);
    if (first() !== before) fill();
    mark(state.place);
    remember({ token: state.place });
  }
  function mark(target, scroll = true) {
    text.querySelector(".current")?.classList.remove("current");
    const element = text.children[target - first()];
    element?.classList.add("current");
    if (scroll) element?.scrollIntoView({ block: "nearest" });
    replace(readout, described(tokens, target).map(fact));
  }
  const placeOf = (event) => first() + [...text.children].indexOf(event.target.closest(".token"));
  text.addEventListener("mouseover", (event) => { if (placeOf(event) >= first()) mark(placeOf(event), false); });
  text.addEventListener("mouseleave", () => mark(state.place, false));
  text.addEventListener("click", (event) => { if (placeOf(event) >= first()) go(placeOf(event)); });
  text.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -100, PageDown: 100,
      Home: -count, End: count };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    go(state.place + moves[event.key]);
  });
  fill();
  return h("div", { class: "token-view" }, choice, legend, pages, text, readout);
}
