// A panel beside a token with the model's alternatives to it, opened by pointer or arrow keys.

import { make, number } from "./dom.js";

const shown = (token) => token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const percent = (logprob) => {
  const value = Math.exp(logprob) * 100;
  return value < 0.05 ? "< 0.1 %" : `${number(value)} %`;
};

export class Tip {
  constructor(element) {
    this.element = element;
    this.marked = null;
    addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  /** Follows the pointer and the arrow keys over an answer; tokens: returns its tokens. */
  watch(answer, tokens) {
    const at = (target) => target.closest?.("[data-token]");
    answer.addEventListener("pointerover", (event) => {
      const span = at(event.target);
      if (span) this.show(span, tokens()[span.dataset.token]);
      else this.hide();
    });
    answer.addEventListener("pointerleave", () => this.hide());
    answer.addEventListener("blur", () => this.hide());
    answer.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const spans = [...answer.querySelectorAll("[data-token]")];
      const next = spans[spans.indexOf(this.marked) + step] ?? spans.at(step > 0 ? 0 : -1);
      if (!next) return;
      next.scrollIntoView({ block: "nearest" });
      this.show(next, tokens()[next.dataset.token]);
    });
  }

  show(span, token) {
    this.hide();
    this.marked = span;
    span.classList.add("marked");
    this.element.replaceChildren(...token.entries.map(table));
    this.element.hidden = false;
    const box = span.getClientRects()[0];
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const isBelow = box.bottom + height + 12 < innerHeight;
    this.element.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.element.style.top = `${isBelow ? box.bottom + 6 : Math.max(8, box.top - height - 6)}px`;
  }

  hide() {
    this.marked?.classList.remove("marked");
    this.marked = null;
    this.element.hidden = true;
  }
}

function table(entry) {
  const rows = entry.top_logprobs.some((one) => one.token === entry.token)
    ? entry.top_logprobs
    : [...entry.top_logprobs, entry];
  const body = rows.map((one) => {
    const bar = make("span", { class: "bar" });
    bar.style.width = `${Math.max(1, Math.exp(one.logprob) * 100)}%`;
    const row = make("tr", one.token === entry.token ? { class: "chosen" } : {});
    row.append(
      make("td", {}, make("code", { textContent: shown(one.token) })),
      make("td", { class: "figure", textContent: percent(one.logprob) }),
      make("td", { class: "track" }, bar),
    );
    return row;
  });
  return make("table", {}, make("tbody", {}, ...body));
}
