// Samples of a run by filters; every filter is a part of the link.

import { feed, isUnfinished, link } from "./api.js";
import { anchor, empty, h, heading, number, replace, select, table } from "./dom.js";
import { NO_SAMPLES, orderOf, paged, pager, progress, stateCell, trail } from "./groups.js";
import { exports } from "./overview.js";

const FILTERS = [
  ["step", "Step", "number"], ["uid", "Group", "text"],
  ["min_score", "Score from", "number"], ["max_score", "Score to", "number"],
  ["min_length", "Tokens from", "number"], ["max_length", "Tokens to", "number"],
  ["finish", "Finish", "text"], ["min_clipped", "Share outside clip range (trainer/sampler) from", "number"],
  ["min_staleness", "Staleness from", "number"], ["state", "State", ["trained", "waiting", "dropped"]],
  ["reason", "Reason", "text"], ["text", "Text contains", "search"],
];

function form(page) {
  const field = ([name, label, kind]) => {
    const value = page.query.get(name) ?? "";
    const set = (text) => page.set({ [name]: text, page: null });
    const input = Array.isArray(kind) ? select(name, value, [["", "any"], ...kind.map((one) => [one, one])], set)
      : h("input", { key: name, type: kind, value, step: kind === "number" && "any", size: "10",
        onchange: (event) => set(event.target.value) });
    return h("label", {}, label, input);
  };
  return h("form", { class: "filters", "aria-label": "Filters" }, FILTERS.map(field),
    anchor(link("samples", { run: page.run }), "Clear the filters", { class: "button", key: "clear" }));
}

export const CLIPPED = "Outside clip range (trainer/sampler)";
export function sampleColumns(page) {
  const run = page.run;
  const open = ({ id, excerpt }) =>
    anchor(link("sample", { run, id }), excerpt || "empty text", { class: "excerpt", key: `sample-${id}` });
  return [
    { label: "Sample", cell: open },
    { label: "Step", sort: "step", number: true, cell: ({ step }) => anchor(link("step", { run, step }), step) },
    { label: "Score", sort: "score", number: true, cell: (row) => number(row.score) },
    { label: "Tokens", sort: "length", number: true, cell: (row) => number(row.length) },
    { label: "Finish", sort: "finish", cell: (row) => row.finish ?? "–" },
    { label: "Staleness", sort: "staleness", number: true, cell: (row) => number(row.staleness) },
    { label: CLIPPED, sort: "clipped", number: true, cell: (row) => number(row.clipped) },
    { label: "State", sort: "reason", cell: stateCell },
  ];
}

export async function samples(page) {
  const order = orderOf(page, "step");
  const query = paged(page, order);
  const next = feed("samples", query, page.signal);
  const box = h("div");
  const step = page.query.get("step");
  const title = page.query.get("uid") ? "Group" : "Samples";
  const way = [step && [`Step ${step}`, link("step", { run: page.run, step })], [title, null]].filter(Boolean);
  const filtered = FILTERS.some(([name]) => page.query.get(name));
  page.show(trail(page, ...way), heading(title === "Group" ? `Samples of a group, step ${step ?? "any"}` : title),
    form(page), exports("samples", query), box);
  return async () => {
    const answer = await next();
    if (!answer) return;
    const nothing = filtered ? empty("No sample passes the filters.", "Widen or clear them.") : empty(...NO_SAMPLES);
    const rows = () => [table("Samples", sampleColumns(page), answer.rows, order), pager(page, answer.total)];
    replace(box, progress(answer), answer.total ? rows() : isUnfinished(answer) ? null : nothing);
    return isUnfinished(answer);
  };
}
