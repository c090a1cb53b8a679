// Curves of any metric over the chosen runs, and the differences of two runs' configuration.

import { exportLink, feed, get, link } from "./api.js";
import { Chart } from "./chart.js";
import { anchor, button, empty, h, heading, number, replace, select, table, unseen } from "./dom.js";

const FIRST = ["critic/score/mean", "response_length/mean", "actor/entropy", "actor/ppo_kl", "actor/grad_norm",
  "perf/throughput"];
const MOST = 40;
const NO_METRICS = ["No metric was logged yet.",
  "The logger `file` writes them: trainer.logger=[console,file]. The page fills as soon as a step ends."];

/** Data source of a validation metric: `val-core/<source>/<reward>/<statistic>`, sources may have slashes. */
function source(metric) {
  const parts = metric.split("/");
  return parts[0] === "val-core" && parts.length >= 4 ? parts.slice(1, -2).join("/") : null;
}

export function exports(what, query) {
  const one = (format, label) =>
    anchor(exportLink(what, query, format), [label, unseen(` of ${what}`)], { download: true, class: "button" });
  return h("span", { class: "buttons" }, one("csv", "CSV"), one("parquet", "Parquet"));
}

/**
 * Charts in `places`, [{box, metrics}], of one question to the server. `refresh` asks it once more, `smooth` sets the
 * weight, `events` are those of all runs.
 */
export function curves(page, places, { runs, x = "step", smooth = 0 }) {
  const query = { run: runs, metric: places.flatMap(({ metrics }) => metrics), x };
  const next = query.metric.length ? feed("curves", query, page.signal) : async () => null;
  const charts = new Map();
  const state = { smooth, series: [], events: [] };
  const open = (series, step) => { location.hash = link("step", { run: series.run, step }); };
  const drawOne = (box, metric) => {
    const lines = state.series.filter((one) => one.metric === metric);
    const series = lines.map((one) => ({ ...one, name: page.name(one.run) }));
    const look = { series, events: state.events, smooth: state.smooth };
    if (charts.has(metric)) return charts.get(metric).update(look);
    const links = exports("curves", { ...query, metric });
    charts.set(metric, new Chart({ title: metric, axis: x, ...look, open, links }));
    box.append(charts.get(metric).element);
  };
  const draw = () => places.forEach(({ box, metrics }) => metrics.forEach((metric) => drawOne(box, metric)));
  return {
    get events() { return state.events; },
    async refresh() {
      const answer = await next();
      if (!answer) return;
      state.series = answer.series;
      const answers = await Promise.all(runs.map((run) => get("events", { run }, page.signal)));
      state.events = answers.flatMap(({ events }, i) => events.map((event) => ({ ...event, run: Number(runs[i]) })));
      draw();
    },
    smooth(weight) {
      state.smooth = weight;
      draw();
    },
  };
}

function runTable(page, chosen) {
  const every = page.runs.map((one) => String(one.run));
  const toggle = (run, on) => page.set({ run: every.filter((one) => (one === run ? on : chosen.includes(one))) });
  const box = (run) => h("input", { type: "checkbox", key: `run-${run}`, checked: chosen.includes(run),
    onchange: (event) => toggle(run, event.target.checked) });
  const columns = [
    { label: "Run", cell: (one) => h("label", { class: `key run-${one.run % 6}` }, box(String(one.run)), one.name) },
    { label: "State", cell: (one) => [h("span", { class: `state ${one.state}` }, one.state), " ", one.why] },
    { label: "Last step", number: true,
      cell: (one) => anchor(link("steps", { run: one.run }), number(one.last_step), { key: `last-${one.run}` }) },
    { label: "Samples", cell: (one) => (one.samples === "tokens" ? "texts and tokens" : one.samples) },
    { label: "Notices", cell: (one) => one.notices.map((notice) => h("p", {}, notice)) },
    { label: "Folder", cell: (one) => h("span", { class: "path" }, one.folder) },
  ];
  return table("Runs", columns, page.runs);
}

function metricList(page, groups, chosen) {
  const search = h("input", { type: "search", id: "find", key: "find", value: page.query.get("find") ?? "" });
  const count = h("p", { role: "status" });
  const item = (metric) => h("label", {}, h("input", { type: "checkbox", value: metric, key: `metric-${metric}`,
    checked: chosen.includes(metric), onchange: choose }), metric);
  const boxes = [...groups].map(([name, metrics]) =>
    h("details", { open: metrics.some((metric) => chosen.includes(metric)) },
      h("summary", {}, `${name} (${metrics.length})`), metrics.map(item)));
  const list = h("div", { class: "metrics" }, boxes);
  const inputs = [...list.querySelectorAll("input")];
  const values = (chosen) => chosen.map((one) => one.value);
  function choose() {
    page.set({ metric: values(inputs.filter((one) => one.checked)) });
  }
  function matches() {
    return values(inputs.filter((one) => !one.parentElement.hidden));
  }
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/);
    for (const one of inputs) one.parentElement.hidden = !words.every((word) => one.value.toLowerCase().includes(word));
    for (const box of boxes) {
      box.hidden = !box.querySelector("label:not([hidden])");
      if (search.value) box.open = true;
    }
    replace(count, `${matches().length} of ${inputs.length} metrics`);
  }
  search.addEventListener("input", () => {
    filter();
    page.remember({ find: search.value });
  });
  filter();
  const show = () => page.set({ metric: matches().slice(0, MOST) });
  return h("aside", { "aria-label": "Metrics" }, h("label", { for: "find" }, "Search metrics"), search, count,
    button(`Chart the matches (up to ${MOST})`, show, { key: "matches" }), list);
}

function controls(page, x, smooth, onsmooth) {
  const axes = ["step", "time", "samples"].map((name) => [name, name]);
  const value = h("output", { for: "smooth" }, String(smooth));
  const slider = h("input", { type: "range", id: "smooth", key: "smooth", min: "0", max: "0.99", step: "0.01",
    value: String(smooth) });
  slider.addEventListener("input", () => {
    value.textContent = slider.value;
    onsmooth(Number(slider.value));
    page.remember({ smooth: slider.value });
  });
  return h("form", { class: "controls" },
    h("label", {}, "Align by ", select("x", x, axes, (axis) => page.set({ x: axis }))),
    h("label", {}, "Smoothing ", slider), value);
}

function eventTable(page, runs, events) {
  const columns = [
    { label: "Run", cell: (one) => page.name(one.run) },
    { label: "Step", number: true, cell: (one) => number(one.step) },
    { label: "Seconds", number: true, cell: (one) => number(one.time) },
    { label: "Kind", cell: (one) => h("span", { class: `event ${one.kind}` }, one.kind) },
    { label: "Event", cell: (one) => one.text },
  ];
  const files = () => runs.map((run) => [page.name(run), exports("events", { run })]);
  return events.length ? [files(), table("Events", columns, events)] : empty("No events yet.");
}

/** Metrics of the runs by group, each once. */
async function metricsOf(page, runs) {
  const answers = await Promise.all(runs.map((run) => get("metrics", { run }, page.signal)));
  const groups = new Map();
  for (const { name, metrics } of answers.flatMap((answer) => answer.groups)) {
    groups.set(name, [...new Set([...(groups.get(name) ?? []), ...metrics])]);
  }
  return groups;
}

export async function overview(page) {
  const named = page.query.getAll("run");
  const runs = named.length ? named : page.runs.slice(0, 6).map((one) => String(one.run));
  const x = page.query.get("x") ?? "step";
  const smooth = Number(page.query.get("smooth") ?? 0);
  const groups = await metricsOf(page, runs);
  const every = [...groups.values()].flat();
  const linked = page.query.getAll("metric").filter((metric) => every.includes(metric));
  const usual = [...new Set([...FIRST.filter((metric) => every.includes(metric)), ...every])];
  const validation = every.filter((metric) => source(metric) !== null && !linked.includes(metric));
  const chosen = linked.length ? linked : usual.filter((metric) => !validation.includes(metric)).slice(0, 6);
  const place = (metrics, name) => ({ name, metrics, box: h("div", { class: "charts" }) });
  const first = place(chosen);
  const sources = [...Map.groupBy(validation, source)].map(([name, metrics]) => place(metrics, name));
  const shown = curves(page, [first, ...sources], { runs, x, smooth });
  const [runBox, list] = [h("div"), h("div")];
  const events = h("details", { ontoggle: fillEvents }, h("summary", {}, "Events"), list);
  const count = () => page.runs.map((one) => one.metrics).join();
  const before = count();
  function fillEvents() {
    if (events.open) replace(list, eventTable(page, runs, shown.events));
  }
  const compare = runs.length === 2 &&
    anchor(link("config", { run: runs[0], against: runs[1] }), "Compare configurations", { class: "button" });
  page.show(heading("Curves"), runBox, exports("runs", {}), compare, every.length === 0 ? empty(...NO_METRICS)
    : h("div", { class: "columns" }, metricList(page, groups, chosen),
      h("div", {}, controls(page, x, smooth, shown.smooth), first.box, events,
        sources.length > 0 && h("h2", {}, "Validation"), sources.map(({ name, box }) => [h("h3", {}, name), box]))));
  return async () => {
    if (count() !== before) return page.reload(); // metrics that were not there when the page was built
    replace(runBox, runTable(page, runs));
    await shown.refresh();
    fillEvents();
  };
}

export async function config(page) {
  const against = page.query.get("against");
  const { rows } = await get("config", { run: page.run, against }, page.signal);
  const words = page.query.get("find") ?? "";
  const matches = rows.filter((row) => row.key.toLowerCase().includes(words.toLowerCase()));
  const value = (one) => h("code", {}, one ?? h("em", {}, "not set"));
  const names = against === null ? [page.run] : [page.run, against];
  const columns = [{ label: "Setting", cell: (row) => h("code", {}, row.key) },
    ...names.map((run, i) => ({ label: page.name(run), cell: (row) => value(row.values[i]) }))];
  const others = page.runs.filter((one) => String(one.run) !== page.run).map((one) => [String(one.run), one.name]);
  const choice = select("against", against ?? "", [["", "no run"], ...others], (run) => page.set({ against: run }));
  const search = h("input", { type: "search", key: "find", value: words,
    onchange: (event) => page.set({ find: event.target.value }) });
  const nothing = words ? "No setting has this in its name."
    : against === null ? "The run wrote no configuration." : "The two configurations are equal.";
  page.show(heading(against === null ? "Configuration" : "Differences of configuration"),
    h("form", { class: "controls" }, h("label", {}, "Against ", choice), h("label", {}, "Search settings ", search),
      exports("config", { run: page.run, against })),
    matches.length ? table("Settings", columns, matches) : empty(nothing));
}
