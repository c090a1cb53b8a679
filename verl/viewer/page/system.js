// What each role did and when, and the numbers of the machine.

import { feed, get, link } from "./api.js";
import { anchor, empty, h, heading, number, plain, replace, table, tint } from "./dom.js";
import { curves, exports } from "./overview.js";

const CHARTS = [/^perf\/(throughput|time_per_step|max_memory|cpu_memory|memory|weights_sent)/, /idle_seconds$/,
  /^rollout\/weights_mb/, /^timing_s\/(gen|update_actor|update_weights)$/];
const MOST = 16;
const MOST_SPANS = 2000;
const [WIDTH, ROW] = [1000, 28];

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function picture(spans, roles, names, seconds) {
  const begin = spans.reduce((least, span) => Math.min(least, span.begin), Infinity);
  const scale = WIDTH / Math.max(seconds, 1e-9);
  const bars = spans.map((span) => {
    const length = span.end - span.begin;
    const place = { x: (span.begin - begin) * scale, y: roles.indexOf(span.role) * ROW + 4 };
    const size = { width: Math.max(length * scale, 1), height: ROW - 8 };
    const title = svg("title", {}, plain(`${span.name}, step ${span.step}: ${number(length)} s`));
    return tint(svg("rect", { ...place, ...size }, title), names.indexOf(span.name));
  });
  const height = roles.length * ROW;
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": "When each role worked; the table below has the numbers" }, ...bars);
  drawn.style.setProperty("height", `${height}px`);
  return drawn;
}

function gantt({ spans, seconds, left_out: notSent = 0 }) {
  const roles = [...new Set(spans.map((span) => span.role))];
  const names = [...new Set(spans.map((span) => span.name))];
  const columns = [
    { label: "Role", cell: (span) => span.role },
    { label: "Work", cell: (span) => span.name },
    { label: "Step", number: true, cell: (span) => number(span.step) },
    { label: "Begin (s)", number: true, cell: (span) => number(span.begin) },
    { label: "Seconds", number: true, cell: (span) => number(span.end - span.begin) },
  ];
  const shown = spans.slice(0, MOST_SPANS);
  const [drawn, every] = [number(shown.length), number(spans.length + notSent)];
  return [
    h("div", { class: "gantt" },
      h("div", { class: "roles", "aria-hidden": "true" }, roles.map((role) => h("span", {}, role))),
      picture(shown, roles, names, seconds)),
    h("p", { class: "legend" }, names.map((name, i) => tint(h("span", { class: "token" }, name), i)),
      `${number(seconds)} seconds in all`),
    drawn !== every && h("p", { class: "note" }, `The first ${drawn} of ${every} spans are drawn; choose fewer steps.`),
    h("details", {}, h("summary", {}, "Spans as a table"), table("Spans", columns, shown)),
  ];
}

export async function system(page) {
  const { run, signal } = page;
  const { groups } = await get("metrics", { run }, signal);
  const every = groups.flatMap((one) => one.metrics);
  const metrics = CHARTS.flatMap((pattern) => every.filter((name) => pattern.test(name))).slice(0, MOST);
  const range = { first: page.query.get("first") ?? "", last: page.query.get("last") ?? "" };
  const nextSpans = feed("gantt", { run, ...range }, signal);
  const nextRoles = feed("system", { run }, signal);
  const [spans, roles, box] = [h("div"), h("div"), h("div", { class: "charts" })];
  const charts = curves(page, [{ box, metrics }], { runs: [run] });
  const field = (name, label) => h("label", {}, label, h("input", { type: "number", min: "0", key: name,
    value: range[name], onchange: (event) => page.set({ [name]: event.target.value }) }));
  const share = ({ busy, idle }) => `${number(Math.round((1000 * idle) / (busy + idle || 1)) / 10)} %`;
  const columns = [
    { label: "Role", cell: (one) => one.role },
    { label: "Busy (s)", number: true, cell: (one) => number(one.busy) },
    { label: "Idle (s)", number: true, cell: (one) => number(one.idle) },
    { label: "Idle share", number: true, cell: share },
    { label: "Last step", number: true, cell: ({ step }) => anchor(link("step", { run, step }), number(step)) },
    { label: "Last work", cell: (one) => one.name },
    { label: "Until (s)", number: true, cell: (one) => number(one.time) },
  ];
  page.show(heading(`System of ${page.name(run)}`),
    h("section", { "aria-label": "Roles over time" }, h("h2", {}, "Roles over time"),
      h("form", { class: "controls" }, field("first", "From step "), field("last", "To step "),
        exports("gantt", { run, ...range }), exports("system", { run })), spans, roles),
    h("section", { "aria-label": "Numbers" }, h("h2", {}, "Speed, memory, weights"),
      metrics.length ? box : empty("No metric of speed or memory was logged yet.")));
  return async () => {
    const [work, numbers] = await Promise.all([nextSpans(), nextRoles(), charts.refresh()]);
    if (work) replace(spans, work.spans.length ? gantt(work) : empty("No spans of these steps.", "Choose others."));
    if (numbers) replace(roles, numbers.roles.length > 0 && table("Roles", columns, numbers.roles),
      numbers.stacks !== null && h("details", {}, h("summary", {}, "Stacks at the last hang"),
        h("pre", { class: "text", tabindex: "0" }, numbers.stacks)));
  };
}
