// A chart of the last minutes: lines over time in SVG, the first one filled; a value under the pointer.

import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, TOP] = [300, 72, 13]; // the line of the highest value is at TOP
const FIRST_SPAN_S = 60;

/** The smallest of 1, 2 or 5 times a power of ten that is at least `value`, or 0.1 % less. */
export function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  /**
   * maxSpanS: the longest time span shown, in seconds; it starts at a minute. show(index, at) is called with the index of the
   * sample under the pointer, or null.
   */
  constructor(numSeries, maxSpanS, format, show) {
    this.maxSpanS = maxSpanS;
    this.format = format;
    this.show = show;
    this.times = [];
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("aria-hidden", "true");
    this.half = this.path("grid");
    this.half.setAttribute("d", `M0 ${TOP}H${WIDTH}M0 ${(TOP + HEIGHT - 1) / 2}H${WIDTH}`);
    this.area = this.path("area");
    this.lines = Array.from({ length: numSeries }, (_, i) => this.path(`line line-${i}`));
    this.cursor = this.path("cursor");
    this.top = make("span", { class: "top" });
    this.from = make("span", { class: "from" });
    this.element = make("div", { class: "chart" }, this.svg, this.from, this.top);
    this.element.addEventListener("pointermove", (event) => this.point(event));
    this.element.addEventListener("pointerleave", () => this.leave());
  }

  path(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    path.setAttribute("vector-effect", "non-scaling-stroke");
    return this.svg.appendChild(path);
  }

  /** times: seconds, ascending; series: one list of values per line, null = no value. */
  draw(times, series) {
    this.times = times;
    this.endS = times.at(-1) ?? 0;
    this.spanS = Math.min(this.maxSpanS, Math.max(FIRST_SPAN_S, this.endS - times[0]));
    this.from.textContent = `−${Math.ceil(this.spanS / 60)} min`;
    const values = series.flat().filter((value) => value !== null);
    const high = ceiling(Math.max(0, ...values));
    const x = (t) => (1 - (this.endS - t) / this.spanS) * WIDTH;
    const y = (value) => HEIGHT - 1 - (value / high) * (HEIGHT - 1 - TOP);
    series.forEach((line, i) => {
      const runs = contiguous(line).map((run) => run.map((at) => `${x(times[at]).toFixed(1)} ${y(line[at]).toFixed(1)}`));
      this.lines[i].setAttribute("d", runs.map((run) => `M${run.join("L")}${run.length === 1 ? "h.1" : ""}`).join(""));
      if (i > 0) return;
      const closed = runs.map((run) => `M${run[0].split(" ")[0]} ${HEIGHT}L${run.join("L")}V${HEIGHT}Z`);
      this.area.setAttribute("d", closed.join(""));
    });
    this.top.textContent = values.length ? this.format(high) : "";
  }

  point(event) {
    if (!this.times.length) return;
    const box = this.svg.getBoundingClientRect();
    const at = this.endS - (1 - (event.clientX - box.left) / box.width) * this.spanS;
    const distance = (t) => Math.abs(t - at);
    const best = this.times.reduce((found, t, i) => (distance(t) < distance(this.times[found]) ? i : found), 0);
    const x = (1 - (this.endS - this.times[best]) / this.spanS) * WIDTH;
    this.cursor.setAttribute("d", `M${x.toFixed(1)} 0V${HEIGHT}`);
    this.show(best, this.endS - this.times[best]);
  }

  leave() {
    this.cursor.setAttribute("d", "");
    this.show(null, 0);
  }
}

/** The runs of consecutive indexes whose values are not null. */
function contiguous(values) {
  const runs = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i > 0 && values[i - 1] !== null && runs.length) runs.at(-1).push(i);
    else runs.push([i]);
  });
  return runs;
}
