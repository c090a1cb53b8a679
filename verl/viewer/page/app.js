// Chooses the view that the link names, and keeps it up to date while a run is running.

import { changed, feed, isUnfinished, link, parse, ServerError } from "./api.js";
import { anchor, button, byKey, empty, h, heading, replace } from "./dom.js";
import { step, steps } from "./groups.js";
import { config, overview } from "./overview.js";
import { compare, prompt, sample } from "./sample.js";
import { samples } from "./samples.js";
import { system } from "./system.js";

const VIEWS = { overview, steps, step, samples, sample, compare, prompt, config, system };
const LABELS = { overview: "Curves", steps: "Steps", samples: "Samples", config: "Configuration", system: "System" };
const INSIDE = { step: "steps", sample: "samples", compare: "samples", prompt: "samples" };
const PERIOD = 2000;

const part = (id) => document.getElementById(id);
const nextRuns = feed("runs", {});
let runs = [];
let current = null; // the view that is shown: its link, its refresh, its way to stop
let paused = false;
let timer = null;

function news(text) {
  if (part("news").textContent !== text) part("news").textContent = text;
}

function report(error) {
  const lost = !(error instanceof ServerError);
  const message = lost ? `This page failed: ${error.message}` : error.message;
  const fix = lost ? "Reload it; if it fails again, report the message." : error.fix;
  part("problem").hidden = false;
  replace(part("problem"), h("strong", {}, message), " ", fix,
    button("Try again", () => open(), { key: "again" }));
}

/** What a view gets: its query, the runs, where to show, and how to move on. */
function pageOf(view, query, signal) {
  return {
    query, signal,
    get runs() { return runs; },
    run: query.get("run") ?? "0",
    name: (run) => runs[run]?.name ?? `run ${run}`,
    link: (values) => link(view, changed(query, values)),
    set: (values) => { location.hash = link(view, changed(parse(location.hash).query, values)); },
    remember: (values) => history.replaceState(null, "", link(view, changed(parse(location.hash).query, values))),
    show: (...nodes) => { if (!signal.aborted) replace(part("main"), nodes); },
    reload: () => open(),
  };
}

function navigation(view, run) {
  const active = INSIDE[view] ?? view;
  replace(part("views"), Object.entries(LABELS).map(([name, label]) =>
    anchor(link(name, name === "overview" ? {} : { run }), label,
      { key: name, "aria-current": name === active && "page" })));
  part("run-choice").hidden = runs.length < 2 || view === "overview";
  const option = (one) => h("option", { value: one.run, selected: String(one.run) === run }, one.name);
  replace(part("run"), runs.map(option));
  const here = view === "overview" ? runs : runs.filter((one) => String(one.run) === run);
  const running = here.some((one) => one.state === "running");
  replace(part("state"), here.length === 1 && h("span", { class: `state ${here[0].state}` }, here[0].state));
  part("pause").hidden = !running;
}

async function open() {
  const { view, query } = parse(location.hash);
  const same = current?.view === view;
  current?.stop.abort();
  const stop = new AbortController();
  const mine = { view, stop, isFirst: !current, key: same ? document.activeElement?.dataset.key : null };
  current = mine;
  const main = part("main");
  main.setAttribute("aria-busy", "true");
  if (!same) replace(main, h("p", { class: "loading" }, "Loading …"));
  try {
    if (!runs.length) runs = (await nextRuns())?.runs ?? runs;
    const page = pageOf(view, query, stop.signal);
    navigation(view, page.run);
    if (!(view in VIEWS)) throw new ServerError(`There is no view “${view}”.`, "Choose one above.");
    const refresh = await VIEWS[view](page);
    mine.hasMore = await refresh?.();
    part("problem").hidden = true;
    mine.refresh = refresh;
    if (current === mine) arrive(mine);
  } catch (error) {
    if (error.name === "AbortError" || current !== mine) return;
    const nothing = empty("Nothing to show here.", "The message above says why.");
    if (!same) replace(main, heading(LABELS[view] ?? "Runs"), nothing);
    report(error);
  } finally {
    if (current === mine) main.removeAttribute("aria-busy");
  }
}

/** The focus stays where it was in the same view, and moves to the heading of another one, but not of the first. */
function arrive({ key, isFirst }) {
  const title = part("main").querySelector("h1");
  document.title = `${title.textContent} – verl`;
  const target = key && byKey(document, key);
  const free = document.activeElement === document.body || part("main").contains(document.activeElement);
  if (target) target.focus({ preventScroll: true });
  else if (free && !isFirst) title.focus({ preventScroll: key !== null });
  news(title.textContent);
}

const lastSteps = () => runs.map((one) => `${one.name} is ${one.state} at step ${one.last_step ?? "none"}`).join(", ");

async function poll() {
  clearTimeout(timer);
  if (document.hidden || paused) return;
  try {
    const before = lastSteps();
    const active = current?.hasMore || runs.some((one) => one.state === "running" || isUnfinished(one));
    const answer = await nextRuns();
    if (answer) runs = answer.runs;
    if (active || lastSteps() !== before) {
      if (current) current.hasMore = await current.refresh?.();
      navigation(current.view, parse(location.hash).query.get("run") ?? "0");
    }
    if (lastSteps() !== before) news(lastSteps());
    if (current?.refresh) part("problem").hidden = true;
  } catch (error) {
    if (error.name !== "AbortError") report(error);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, current?.hasMore ? 0 : PERIOD);
}

addEventListener("hashchange", open);
document.addEventListener("visibilitychange", poll);
part("run").addEventListener("change", (event) => {
  const { view } = parse(location.hash);
  location.hash = link(INSIDE[view] ?? view, { run: event.target.value });
});
part("pause").addEventListener("click", () => {
  paused = !paused;
  part("pause").setAttribute("aria-pressed", String(paused));
  poll();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash names the view
  part("main").focus();
});
document.addEventListener("submit", (event) => event.preventDefault());
open().then(poll);
