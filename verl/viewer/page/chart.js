// One chart of one metric, a line per run: by mouse, by keyboard (a slider over its points), as a table, as a picture.

import { button, h, number, plain, replace, table, unseen } from "./dom.js";

const COLORS = 6;
const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3], [14, 4], [4, 8]];
const HEIGHT = 200;
const INCREMENTS = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const charts = new Set();

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Exponential moving average that leaves the first values unbiased; `weight` of the past in [0, 1). */
function smoothed(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + 1 - weight;
    return sum / mass;
  });
}

function aligned(series, smooth) {
  const tables = series.map(({ x, y }) => (smooth > 0 ? [x, smoothed(y, smooth), y] : [x, y]));
  return tables.length > 1 ? uPlot.join(tables) : (tables[0] ?? [[]]);
}

/** The place in `x` of the value next to `value`. */
function nearest(x, value) {
  let best = 0;
  for (let i = 1; i < x.length; i++) if (Math.abs(x[i] - value) < Math.abs(x[best] - value)) best = i;
  return best;
}

/**
 * `title`; `axis`: name of x; `series`: [{name, run, x, y, steps, thinned}]; `events`: [{run, step, kind, text}];
 * `open(series, step)`: called by click or Enter; `links`: further links of the heading.
 */
export class Chart {
  constructor({ title, axis, series, events = [], smooth = 0, open = null, links = [] }) {
    Object.assign(this, { title, axis, series, events, smooth, open, plot: null, place: null, zoomed: false });
    this.area = h("div", { class: "plot", tabindex: "0", role: "slider", key: `chart-${title}`,
      "aria-label": `${plain(title)}; arrow keys move along ${axis}, Enter opens the step` });
    this.readout = h("p", { class: "readout" });
    this.values = h("details", { class: "values", ontoggle: () => this.fillTable() }, h("summary", {}, "Values"));
    const png = button(["PNG", unseen(` of ${title}`)], () => this.save());
    const caption = h("figcaption", {}, h("strong", {}, title), h("span", { class: "buttons" }, links, png));
    this.element = h("figure", { class: "chart" }, caption, this.area, this.readout, this.values);
    this.area.addEventListener("keydown", (event) => this.press(event));
    this.area.addEventListener("focus", () => this.show(this.place ?? Infinity));
    new ResizeObserver(() => this.resize()).observe(this.area);
    this.describe();
  }

  resize() {
    const width = this.area.clientWidth;
    if (!this.area.isConnected) this.forget();
    else if (width > 0 && !this.plot) this.draw(width);
    else if (width > 0) this.plot.setSize({ width, height: HEIGHT });
  }

  forget() {
    charts.delete(this);
    this.plot?.destroy();
    this.plot = null;
  }

  draw(width) {
    const lines = this.series.flatMap(({ name, run }) => {
      const stroke = () => color(`run-${run % COLORS}`);
      const line = { label: name, stroke, width: 2, dash: DASHES[run % COLORS] };
      const faint = { label: `${name}, raw`, stroke: () => stroke() + "66", width: 1, points: { show: false } };
      return this.smooth > 0 ? [line, faint] : [line];
    });
    const grid = { stroke: () => color("line"), width: 1 };
    const range = (_, low, high) => (low === high ? [low - 1, low + 1] : uPlot.rangeNum(low, high, 0.1, true));
    const values = (_, ticks) => ticks.map(number);
    const axis = { stroke: () => color("muted"), grid, ticks: { show: false }, values };
    const options = {
      width, height: HEIGHT, legend: { show: false }, series: [{}, ...lines],
      scales: { x: { time: false }, y: { range } },
      axes: [{ ...axis, size: 28, incrs: INCREMENTS }, { ...axis, size: 64 }],
      cursor: { y: false },
      hooks: { draw: [(plot) => this.drawEvents(plot)], setCursor: [(plot) => this.follow(plot)],
        setSelect: [(plot) => { if (plot.select.width > 0) this.zoomed = true; }] },
    };
    this.plot = new uPlot(options, aligned(this.series, this.smooth), this.area);
    this.plot.over.addEventListener("click", () => this.choose());
    this.plot.over.addEventListener("dblclick", () => { this.zoomed = false; });
    charts.add(this);
  }

  /** New points, or another smoothing, without losing cursor and zoom; false where the chart has to be built again. */
  update({ series, events, smooth = this.smooth }) {
    const same = series.length === this.series.length && smooth > 0 === this.smooth > 0;
    Object.assign(this, { series, events, smooth });
    if (!same && this.plot) {
      this.forget();
      this.resize();
    } else this.plot?.setData(aligned(series, smooth), !this.zoomed);
    this.fillTable();
    this.describe();
  }

  /** The place of the point next to an event; null: the curve ends before it, or begins after it. */
  xOf(event) {
    const { x, steps } = this.series.find(({ run }) => run === event.run) ?? { steps: [] };
    const isInside = event.step !== null && event.step >= steps[0] && event.step <= steps.at(-1);
    return isInside ? x[nearest(steps, event.step)] : null;
  }

  drawEvents(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4, 4]);
    for (const event of this.events) {
      const near = this.xOf(event);
      const value = near !== null && this.axis === "step" ? event.step : near; // a curve may lack the step
      if (value === null || value < plot.scales.x.min || value > plot.scales.x.max) continue;
      const left = Math.round(plot.valToPos(value, "x", true));
      ctx.strokeStyle = ctx.fillStyle = color(`event-${event.kind}`) || color("muted");
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillRect(left - 3 * devicePixelRatio, bbox.top, 6 * devicePixelRatio, 6 * devicePixelRatio);
    }
    ctx.restore();
  }

  /** The mouse has moved: every chart of the page shows the same place. */
  follow(plot) {
    if (!plot.cursor.event || plot.cursor.idx === null || plot.cursor.idx === undefined) return;
    const value = plot.data[0][plot.cursor.idx];
    for (const chart of charts) chart.show(value, chart === this);
  }

  show(value, quiet = false) {
    const x = this.plot?.data[0] ?? [];
    if (!x.length) return;
    this.place = x[nearest(x, Math.min(value, x.at(-1)))];
    const left = this.plot.valToPos(this.place, "x");
    if (!quiet) this.plot.setCursor({ left, top: 10 }, false);
    this.describe();
  }

  describe() {
    const lines = this.series.filter(({ x }) => x.length);
    if (!lines.length) return replace(this.readout, "no points yet");
    const [least, most] = [Math.min(...lines.map(({ x }) => x[0])), Math.max(...lines.map(({ x }) => x.at(-1)))];
    const place = this.place ?? most;
    const parts = lines.map(({ name, run, x, y, steps }) => {
      const i = nearest(x, place);
      const shown = this.smooth > 0 ? smoothed(y, this.smooth)[i] : y[i];
      const raw = this.smooth > 0 ? ` (${number(y[i])})` : "";
      const value = y[i] === null ? "not a number" : number(shown) + raw;
      return { run, x: x[i], text: `${lines.length > 1 ? name + " " : ""}step ${steps[i]}: ${value}` };
    });
    const isHere = (event) => parts.some(({ run, x }) => run === event.run && x === this.xOf(event));
    const kinds = [...new Set(this.events.filter(isHere).map(({ kind }) => kind))];
    const thinned = lines.some((one) => one.thinned) && h("span", {}, "smallest and largest value per interval");
    replace(this.readout, parts.map((part) => h("span", { class: `key run-${part.run % COLORS}` }, part.text)),
      kinds.map((kind) => h("span", { class: `event ${kind}` }, kind)), thinned);
    const limits = { valuemin: least, valuemax: most, valuenow: Math.min(Math.max(place, least), most) };
    for (const [name, number] of Object.entries(limits)) this.area.setAttribute(`aria-${name}`, number);
    this.area.setAttribute("aria-valuetext", plain([...parts.map((part) => part.text), ...kinds].join("; ")));
  }

  press(event) {
    const x = this.plot?.data[0] ?? [];
    if (!x.length) return;
    const at = nearest(x, this.place ?? x.at(-1));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -x.length, End: x.length };
    if (event.key === "Enter") return this.choose();
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.show(x[Math.min(Math.max(at + moves[event.key], 0), x.length - 1)]);
  }

  /** Opens the step at the cursor, of the run whose line is next to it. */
  choose() {
    if (this.place === null || !this.open) return;
    const top = this.plot.cursor.top;
    const distance = ({ x, y }) => {
      const i = nearest(x, this.place);
      return Math.abs(x[i] - this.place) * 1e6 + Math.abs(this.plot.valToPos(y[i] ?? 0, "y") - top);
    };
    const near = this.series.filter(({ x }) => x.length).sort((a, b) => distance(a) - distance(b))[0];
    this.open(near, near.steps[nearest(near.x, this.place)]);
  }

  fillTable() {
    if (!this.values.open) return;
    const row = ({ name, steps, x, y }, i) => [name, steps[i], x[i], y[i] ?? "not a number"];
    const rows = this.series.flatMap((one) => one.x.map((_, i) => row(one, i)));
    const labels = ["Run", "Step", this.axis, "Value"];
    const columns = labels.map((label, i) => ({ label, number: i > 0, cell: (row) => String(row[i]) }));
    if (this.axis === "step") columns.splice(2, 1);
    replace(this.values, h("summary", {}, "Values"), table(`Values of ${this.title}`, columns, rows));
  }

  /** Saves the chart as PNG with its title and its lines' names, on the background of the page. */
  save() {
    if (!this.plot) return;
    const source = this.plot.ctx.canvas;
    const scale = source.width / this.plot.width;
    const line = 22 * scale;
    const names = this.series.length > 1 ? this.series : [];
    const canvas = h("canvas", { width: source.width, height: source.height + line * (1 + names.length) });
    const ctx = canvas.getContext("2d");
    const write = (text, row, name) => {
      ctx.fillStyle = color(name);
      ctx.font = `${14 * scale}px system-ui, sans-serif`;
      ctx.fillText(plain(text), 8 * scale, row * line - 6 * scale);
    };
    ctx.fillStyle = color("page");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    write(this.title, 1, "text");
    names.forEach(({ name, run }, i) => write(name, i + 2, `run-${run % COLORS}`));
    ctx.drawImage(source, 0, line * (1 + names.length));
    canvas.toBlob((blob) => {
      const url = URL.createObjectURL(blob);
      h("a", { href: url, download: `${this.title.replace(/[^\w.-]+/g, "_")}.png` }).click();
      URL.revokeObjectURL(url);
    });
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.plot?.redraw(false);
});
