// Shows an answer while it grows: simple Markdown (paragraphs, headings, fenced code, `code`, **bold**), a span per token.

import { make } from "./dom.js";

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;

/** The blocks of `text`: {kind: "p" | "h" | "code", start, spans: [{start, end, kind}]}; Markdown marks are in no span. */
export function parse(text) {
  const blocks = [];
  let open = null; // the block that the next line may belong to
  let at = 0;
  for (const line of text.split(/(?<=\n)/)) {
    const [start, end] = [at, (at += line.length)];
    const isFence = /^\s*```/.test(line);
    if (open?.kind === "code") {
      if (isFence) open = null;
      else open.spans.push({ start, end, kind: "text" });
    } else if (isFence) {
      blocks.push((open = { kind: "code", start, spans: [] }));
    } else if (!line.trim()) {
      open = null;
    } else if (/^#{1,6}\s/.test(line)) {
      const mark = line.indexOf(" ") + 1;
      blocks.push({ kind: "h", start, spans: inline(text, start + mark, end) });
      open = null;
    } else {
      if (!open) blocks.push((open = { kind: "p", start, spans: [] }));
      open.spans.push(...inline(text, start, end));
    }
  }
  return blocks;
}

function inline(text, start, end) {
  const spans = [];
  const line = text.slice(start, end);
  let at = 0;
  for (const found of line.matchAll(INLINE)) {
    const width = found[1] === undefined ? 2 : 1;
    spans.push({ start: start + at, end: start + found.index, kind: "text" });
    at = found.index + found[0].length;
    spans.push({ start: start + found.index + width, end: start + at - width, kind: width === 1 ? "code" : "strong" });
  }
  spans.push({ start: start + at, end, kind: "text" });
  return spans.filter((span) => span.end > span.start);
}

/** Draws text into `element`. When text is added, only the last block is drawn again. */
export class Growing {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.tokens = []; // {start, end, entries}
    this.settled = 0; // where the last block begins
    this.pending = []; // entries whose text has not come yet: parts of a character
    this.frame = 0;
  }

  /** Appends text with its log-probabilities. */
  add(text, entries = []) {
    this.pending.push(...entries);
    if (!text) return;
    const start = this.text.length;
    this.text += text;
    this.tokens.push({ start, end: this.text.length, entries: this.pending });
    this.pending = [];
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const from = this.settled;
    const blocks = parse(this.text.slice(from));
    for (const child of [...this.element.children]) if (Number(child.dataset.start) >= from) child.remove();
    let first = this.tokens.length;
    while (first > 0 && this.tokens[first - 1].end > from) first--;
    for (const block of blocks) {
      const { outer, inner } = container(block.kind);
      outer.dataset.start = from + block.start;
      for (const span of block.spans) this.fill(inner, span, from, first);
      this.element.append(outer);
    }
    if (blocks.length) this.settled = from + blocks.at(-1).start;
  }

  fill(parent, span, from, first) {
    const into = span.kind === "text" ? parent : parent.appendChild(make(span.kind));
    const [low, high] = [from + span.start, from + span.end];
    for (let i = first; i < this.tokens.length && this.tokens[i].start < high; i++) {
      const token = this.tokens[i];
      const text = this.text.slice(Math.max(low, token.start), Math.min(high, token.end));
      if (text) into.append(tokenSpan(text, token.entries, i));
    }
  }
}

function container(kind) {
  if (kind !== "code") {
    const outer = make("p", kind === "h" ? { class: "heading" } : {});
    return { outer, inner: outer };
  }
  const inner = make("code");
  return { outer: make("pre", { tabIndex: 0 }, inner), inner };
}

function tokenSpan(text, entries, index) {
  const span = make("span", { textContent: text });
  if (entries.length) {
    const p = Math.exp(Math.min(...entries.map((entry) => entry.logprob)));
    span.className = `token sure-${p > 0.9 ? 4 : p > 0.6 ? 3 : p > 0.3 ? 2 : p > 0.1 ? 1 : 0}`;
    span.dataset.token = index;
  }
  return span;
}
