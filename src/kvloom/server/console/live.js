// Live figures: keeps the feed's samples of the last minutes and draws them.

import { Chart } from "./chart.js";
import { byId, choices, make, number } from "./dom.js";

export const SPAN_S = 300;
const RATE_S = 3; // a rate is of the last so many seconds
const MEAN_S = 15; // a mean time or share likewise

const total = (name) => (model) => model[name];
const milliseconds = (value) => (value === null ? null : value * 1000);

/** The charts: their lines as functions of a History and an index; `of` gives the maximum of the newest value. */
const CHARTS = [
  { id: "output", title: "Output", unit: "tokens/s", lines: [{ name: "generated", at: (h, i) => h.rate(i, total("output_tokens")) }] },
  {
    id: "ttft",
    title: "Time to first token",
    unit: "ms",
    note: `mean of ${MEAN_S} s`,
    lines: [{ name: "first token", at: (h, i) => milliseconds(h.mean(i, (m) => m.first_token.sum_s, (m) => m.first_token.count)) }],
  },
  {
    id: "tpot",
    title: "Time between tokens",
    unit: "ms",
    note: `mean of ${MEAN_S} s`,
    lines: [{ name: "gap", at: (h, i) => milliseconds(h.mean(i, (m) => m.between_tokens.sum_s, (m) => m.between_tokens.count)) }],
  },
  {
    id: "guesses",
    title: "Tokens a step",
    unit: "of a stream",
    note: `mean of ${MEAN_S} s`, // a step brings one token, and those of its guesses that were right
    lines: [{ name: "tokens", at: (h, i) => h.mean(i, total("output_tokens"), (m) => m.output_tokens - m.accepted_tokens) }],
  },
  {
    id: "requests",
    title: "Requests",
    unit: "running",
    lines: [
      { name: "running", at: (h, i) => h.sum(i, total("num_running")) },
      { name: "waiting", at: (h, i) => h.sum(i, total("num_waiting")) + h.samples[i].feed.num_queued },
    ],
  },
  {
    id: "kv",
    title: "KV blocks in use",
    unit: "blocks",
    lines: [{ name: "in use", at: (h, i) => h.sum(i, (m) => m.num_blocks - m.num_free_blocks) }],
    of: (h) => h.sum(h.samples.length - 1, total("num_blocks")),
  },
  {
    id: "cache",
    title: "Prefix cache hits",
    unit: "% of prompt tokens",
    note: `of ${MEAN_S} s`,
    lines: [{ name: "hits", at: (h, i) => percent(h.mean(i, total("cached_tokens"), total("prompt_tokens"))) }],
  },
  {
    id: "pool",
    title: "KV pool (EMS)",
    unit: "blocks/s loaded",
    isShown: (h) => h.models(h.samples.length - 1).some((model) => model.pool),
    lines: [
      { name: "loaded", at: (h, i) => h.rate(i, (m) => m.pool?.loaded_blocks ?? 0) },
      { name: "saved", at: (h, i) => h.rate(i, (m) => m.pool?.saved_blocks ?? 0) },
    ],
  },
];

function percent(share) {
  return share === null ? null : Math.min(100, share * 100);
}

/** The feed's samples of the last SPAN_S seconds, and rates computed from pairs of them. `model` "" = all models. */
export class History {
  constructor() {
    this.samples = []; // {t, feed}
    this.model = "";
  }

  add(feed, t) {
    this.samples.push({ t, feed });
    while (t - this.samples[0].t > SPAN_S) this.samples.shift();
  }

  models(i) {
    const { models } = this.samples[i].feed;
    return this.model ? models.filter(({ name }) => name === this.model) : models;
  }

  sum(i, value) {
    return this.models(i).reduce((found, model) => found + value(model), 0);
  }

  /** Whether the server has started anew since the last sample. */
  hasRestarted(feed) {
    return feed.uptime_s < this.samples.at(-1)?.feed.uptime_s;
  }

  /** The newest sample at least `seconds` before sample i, or the oldest of the server's life then; i if it is that one. */
  before(i, seconds) {
    const { samples } = this;
    let j = i;
    while (j > 0 && samples[i].t - samples[j].t < seconds && samples[j - 1].feed.uptime_s <= samples[j].feed.uptime_s) j--;
    return j;
  }

  /** The increase of a total per second; null if unknown. */
  rate(i, value) {
    const j = this.before(i, RATE_S);
    const gained = this.sum(i, value) - this.sum(j, value);
    return j === i || gained < 0 ? null : gained / (this.samples[i].t - this.samples[j].t);
  }

  /** The increase of one total per unit of another; null if the other did not increase. */
  mean(i, value, count) {
    const j = this.before(i, MEAN_S);
    const counted = this.sum(i, count) - this.sum(j, count);
    return counted > 0 ? (this.sum(i, value) - this.sum(j, value)) / counted : null;
  }
}

export class Live {
  constructor() {
    this.history = new History();
    this.tiles = CHARTS.map((spec) => new Tile(spec, this.history));
    byId("charts").append(...this.tiles.map((tile) => tile.element));
    byId("live-model").addEventListener("change", () => this.draw());
  }

  add(feed, t) {
    this.history.add(feed, t);
    choices(byId("live-model"), ["", ...feed.models.map(({ name }) => name)], "All models");
    byId("live-model-field").hidden = feed.models.length < 2;
    this.draw();
  }

  draw() {
    if (!this.history.samples.length || byId("live").hidden) return;
    this.history.model = byId("live-model").value;
    for (const tile of this.tiles) tile.draw();
  }
}

class Tile {
  constructor(spec, history) {
    this.spec = spec;
    this.history = history;
    this.values = [];
    this.pointed = null;
    this.value = make("strong");
    this.unit = make("span", { class: "unit", textContent: spec.unit });
    this.second = make("span", { class: "second" });
    this.chart = new Chart(spec.lines.length, SPAN_S, number, (index, ago) => {
      this.pointed = index === null ? null : { index, ago };
      this.tell();
    });
    const title = make("h3", { textContent: spec.title });
    if (spec.note) title.append(make("small", { textContent: spec.note }));
    const figure = make("p", { class: "value" }, this.value, this.unit, this.second);
    this.element = make("section", { class: "tile", id: `chart-${spec.id}` }, title, figure, this.chart.element);
  }

  draw() {
    this.element.hidden = !(this.spec.isShown?.(this.history) ?? true);
    if (this.element.hidden) return;
    const { samples } = this.history;
    this.values = this.spec.lines.map((line) => samples.map((_, i) => line.at(this.history, i)));
    this.chart.draw(samples.map(({ t }) => t), this.values);
    this.tell();
  }

  /** Shows the value under the pointer, or the newest one. */
  tell() {
    const index = this.pointed?.index ?? this.values[0].length - 1;
    this.value.textContent = number(this.values[0][index]);
    const facts = this.spec.lines.slice(1).map((line, i) => `${number(this.values[i + 1][index])} ${line.name}`);
    if (this.spec.of) facts.push(`of ${number(this.spec.of(this.history))}`);
    if (this.pointed) facts.push(`${Math.round(this.pointed.ago)} s ago`);
    this.second.textContent = facts.join(" · ");
  }
}
