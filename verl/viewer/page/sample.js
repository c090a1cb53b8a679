// One sample with everything that is on the disk of it; two samples of a group next to each other; a prompt over
// training.

import { get, link } from "./api.js";
import { Chart } from "./chart.js";
import { anchor, empty, facts, h, heading, longText, number, table, unseen } from "./dom.js";
import { pager, trail } from "./groups.js";
import { exports } from "./overview.js";
import { CLIPPED, sampleColumns } from "./samples.js";
import { tokenView } from "./tokens.js";

const NO_TOKENS = "This sample has no numbers of its tokens. trainer.rollout_data_tokens writes them.";
const MOST = 500;
const IMAGE = /^data:image\/(png|jpeg|webp|gif);base64,/;

function section(title, ...content) {
  return h("section", { "aria-label": title }, h("h2", {}, title), content);
}

function asText(value) {
  return value === null || value === undefined || typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

function textFacts(object) {
  return Object.entries(object).map(([name, value]) => [name, asText(value)]);
}

function summary(one) {
  return facts([["Score", number(one.score)], ["Tokens", number(one.length)], ["Finish", one.finish], ["Row", one.row],
    [CLIPPED, one.clipped], ["Staleness", one.staleness], ["Step", one.step],
    ["State", one.state], ["Reason", one.reason], ["Id", one.id]]);
}

function way(page, { step, uid }, label) {
  return trail(page, [`Step ${step}`, link("step", { run: page.run, step })],
    ["Group", link("samples", { run: page.run, step, uid })], [label, null]);
}

/** `remember` takes what the link has to hold of the tokens' view. */
function response(page, one, remember, rest = null) {
  const text = () => longText(one.response, "Response", rest);
  if (!one.tokens?.text.length) return [text(), h("p", { class: "note" }, NO_TOKENS)];
  const [measure, place] = [page.query.get("color") ?? "log_prob", Number(page.query.get("token") ?? 0)];
  const plain = h("details", {}, h("summary", {}, "Text without tokens"), text());
  const files = exports("tokens", { run: page.run, id: one.id });
  return [tokenView(one.tokens, { measure, place, remember }), files, plain];
}

function turn({ role, text }) {
  return h("article", { "aria-label": `Turn: ${role}` }, h("h3", {}, role), longText(text, `Text of ${role}`));
}

function image(url, i) {
  if (IMAGE.test(url)) return h("img", { src: url, alt: `Image ${i + 1} of the prompt` });
  return h("p", { class: "note" }, `Image ${i + 1} is of a kind that is not shown; PNG, JPEG, WebP and GIF are.`);
}

function ledger({ state, reason, meaning, ledger: line }) {
  if (!line) return empty("The ledger has no line of this sample.", "trainer.ledger=true writes one per sample.");
  const why = reason ? `It was ${state}: ${meaning || reason}.` : `State: ${state ?? "unknown"}.`;
  return [h("p", {}, why), facts(textFacts(line))];
}

function others(page, one, { rows, total }) {
  const to = (row) => anchor(link("compare", { run: page.run, id: one.id, with: row.id }),
    ["Compare", unseen(` with the sample of score ${number(row.score)}`)], { key: `with-${row.id}` });
  const columns = sampleColumns(page).filter(({ label }) => label !== "Step");
  const left = rows.filter((row) => row.id !== one.id);
  const note = total > rows.length && h("p", { class: "note" }, `Of its ${total} samples the ${rows.length} best. `,
    anchor(link("samples", { run: page.run, step: one.step, uid: one.uid }), "All of them"));
  return left.length ? [table("Other samples of the group", [...columns, { label: "Compare", cell: to }], left), note]
    : empty("It is the only sample of its group.");
}

export async function sample(page) {
  const { run, signal } = page;
  const id = page.query.get("id");
  const one = await get("sample", { run, id, all: page.query.get("all") }, signal);
  const filters = { run, step: one.step, uid: one.uid, sort: "score", descending: "1", page: "0", size: "50" };
  const group = await get("samples", filters, signal);
  const rest = (key) => one.cut && anchor(page.link({ all: "1" }), "Load all of its text", { class: "button", key });
  page.show(way(page, one, "Sample"), heading(`Sample with score ${number(one.score)}`), summary(one),
    one.cut && h("p", { class: "note" }, "Its text, or its list of tokens, is cut here. ", rest("rest")),
    section("Response", response(page, one, page.remember, rest("all"))),
    section("Prompt", longText(one.prompt, "Prompt"), one.images.map(image)),
    one.turns.length > 0 && section("Turns", one.turns.map(turn)),
    section("Reward", facts([["Score", number(one.score)], ["Reference answer", asText(one.ground_truth)],
      ...textFacts(one.extra)])),
    section("Ledger: what became of it", ledger(one)),
    section("The group", anchor(link("prompt", { run, id }), "This prompt over training", { class: "button" }),
      others(page, one, group)));
}

export async function compare(page) {
  const ids = [page.query.get("id"), page.query.get("with")];
  const both = await Promise.all(ids.map((id) => get("sample", { run: page.run, id }, page.signal)));
  const together = ({ color }) => { if (color) page.set({ color }); };
  const column = (one, i) => h("article", { "aria-label": `Sample ${i + 1}` },
    h("h2", {}, anchor(link("sample", { run: page.run, id: one.id }), `Score ${number(one.score)}`)), summary(one),
    response(page, one, together));
  page.show(way(page, both[0], "Compare"), heading("Two samples"),
    h("details", {}, h("summary", {}, "Prompt of the first"), longText(both[0].prompt, "Prompt")),
    h("div", { class: "pair" }, both.map(column)));
}

export async function prompt(page) {
  const { run } = page;
  const id = page.query.get("id");
  const { rows, total } = await get("prompt", { run, id, page: page.query.get("page"), size: MOST }, page.signal);
  const steps = [...Map.groupBy(rows, (row) => row.step)].sort(([a], [b]) => a - b);
  const mean = (group) => group.reduce((sum, row) => sum + row.score, 0) / group.length;
  const x = steps.map(([step]) => step);
  const y = steps.map(([, group]) => (group.some((row) => row.score === null) ? null : mean(group)));
  const chart = new Chart({ title: "Mean score of this prompt", axis: "step",
    series: [{ run: Number(run), name: page.name(run), x, y, steps: x }],
    open: (_, step) => { location.hash = link("step", { run, step }); } });
  const labels = ["Sample", "Step", "Score", "Tokens"];
  const columns = sampleColumns(page).filter(({ label }) => labels.includes(label));
  const [{ row, uid }] = rows; // all of them are answers to the same row, or of one group where it is not known
  const query = { run, sort: "step", ...(row === null ? { uid } : { row }) };
  page.show(trail(page, ["Sample", link("sample", { run, id })], ["Prompt", null]), heading("One prompt over training"),
    chart.element, exports("samples", query), table("Its samples", columns, rows), pager(page, total, MOST));
}
