// The steps of a run, and the groups of one step: which prompts gave a signal, and which were dropped and why.

import { feed, isUnfinished, link } from "./api.js";
import { anchor, empty, h, heading, number, replace, table } from "./dom.js";
import { exports } from "./overview.js";

const SIZE = 50;

export const NO_SAMPLES = ["No sample of this run is on the disk.",
  "trainer.rollout_data_dir=FOLDER writes the texts of every step."];

/** The way from the run to this view: [[label, link or null]]. */
export function trail(page, ...parts) {
  const run = page.run;
  const items = [["Curves", link("overview", { run })], ["Steps", link("steps", { run })], ...parts];
  const item = ([label, target]) => h("li", {},
    target ? anchor(target, label, { key: `trail-${label}` }) : h("span", { "aria-current": "page" }, label));
  return h("nav", { "aria-label": "Way to this view", class: "trail" }, h("ol", {}, items.map(item)));
}

/** Order of a table by the link; without one it descends by `sort`. */
export function orderOf(page, sort) {
  const descending = page.query.has("sort") ? page.query.get("descending") === "1" : true;
  return { sort: page.query.get("sort") ?? sort, descending, link: page.link };
}

/** The question for one page of a table. */
export function paged(page, { sort, descending }) {
  const query = Object.fromEntries(page.query);
  return { ...query, run: page.run, sort, descending: descending ? "1" : "0", page: query.page ?? "0", size: SIZE };
}

export function pager(page, total, size = SIZE) {
  const at = Number(page.query.get("page") ?? 0);
  const last = Math.max(Math.ceil(total / size) - 1, 0);
  const to = (place, label) => place >= 0 && place <= last &&
    anchor(page.link({ page: place }), label, { class: "button", key: `to-${label}` });
  return h("nav", { "aria-label": "Pages", class: "buttons" }, `${number(total)} rows, page ${at + 1} of ${last + 1}`,
    to(at - 1, "Previous page"), to(at + 1, "Next page"));
}

/** What the server has still to read; a view's refresh is true then. */
export function progress({ indexed, searched }) {
  const part = [[searched, "searched"], [indexed, "read"]].find(([one]) => one && one.files < one.of);
  return part && h("p", { class: "note" }, `${part[0].files} of ${part[0].of} files are ${part[1]} …`);
}

export function stateCell(row) {
  return [h("span", { class: `state ${row.state}` }, row.state ?? "unknown"), row.reason && ` ${row.reason}`];
}

export async function steps(page) {
  const run = page.run;
  const next = feed("steps", { run }, page.signal);
  const box = h("div");
  page.show(heading(`Steps of ${page.name(run)}`), exports("steps", { run }), box);
  const samples = (row, label, filter) => anchor(link("samples", { run, step: row.step, ...filter }), label);
  const groups = ({ step }) => anchor(link("step", { run, step }), number(step), { key: `step-${step}` });
  const columns = [
    { label: "Step", number: true, cell: groups },
    { label: "Groups", number: true, cell: (row) => number(row.groups) },
    { label: "Samples", number: true, cell: (row) => samples(row, number(row.samples)) },
    { label: "Mean score", number: true, cell: (row) => number(row.score_mean) },
    { label: "Mean length", number: true, cell: (row) => number(row.length_mean) },
    { label: "Dropped", number: true,
      cell: (row) => (row.dropped ? samples(row, number(row.dropped), { state: "dropped" }) : number(row.dropped)) },
  ];
  return async () => {
    const answer = await next();
    if (!answer) return;
    const steps = answer.steps.toReversed();
    replace(box, progress(answer), steps.length ? table("Steps", columns, steps) : empty(...NO_SAMPLES));
    return isUnfinished(answer);
  };
}

function spread({ score_min: low, score_max: high }) {
  return low === null || high === null ? "–" : `${number(high - low)} (${number(low)} to ${number(high)})`;
}

export async function step(page) {
  const at = Number(page.query.get("step") ?? 0);
  const order = orderOf(page, "score_spread");
  const query = paged(page, order);
  const next = feed("groups", query, page.signal);
  const box = h("div");
  const samples = ({ uid, prompt }) =>
    anchor(link("samples", { run: page.run, step: at, uid }), prompt || uid, { class: "excerpt", key: `group-${uid}` });
  const columns = [
    { label: "Prompt", cell: samples },
    { label: "Samples", sort: "samples", number: true, cell: (row) => number(row.samples) },
    { label: "Spread", sort: "score_spread", number: true, cell: spread },
    { label: "Mean score", sort: "score_mean", number: true, cell: (row) => number(row.score_mean) },
    { label: "Mean length", sort: "length_mean", number: true, cell: (row) => number(row.length_mean) },
    { label: "State", sort: "reason", cell: stateCell },
  ];
  const other = (step, label) => anchor(page.link({ step, page: null }), label, { class: "button", key: label });
  page.show(trail(page, [`Step ${at}`, null]), heading(`Groups of step ${at}`),
    h("p", { class: "buttons" }, other(Math.max(at - 1, 0), "Step before"), other(at + 1, "Step after"),
      anchor(link("samples", { run: page.run, step: at }), "All samples of the step", { class: "button" }),
      exports("groups", query)), box);
  return async () => {
    const answer = await next();
    if (!answer) return;
    const rows = () => [table(`Groups of step ${at}`, columns, answer.rows, order), pager(page, answer.total)];
    const nothing = empty(`Step ${at} has no groups on the disk.`, NO_SAMPLES[1]);
    replace(box, progress(answer), answer.total ? rows() : nothing);
    return isUnfinished(answer);
  };
}
