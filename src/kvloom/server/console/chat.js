// The chat: one conversation, streamed, stoppable, with sampling controls.

import { Problem, events, request } from "./api.js";
import { byId, choices, duration, make, number } from "./dom.js";
import { Growing } from "./text.js";
import { Tip } from "./tip.js";

const TOP_LOGPROBS = 5;
const EXAMPLES = [
  "Explain a KV cache in two sentences.",
  "Write a haiku about weaving.",
  "Write a Python function that reverses a list.",
];
const ENDED = { length: "cut at the token limit", stop: "" };

export class Chat {
  constructor() {
    this.messages = []; // what the model is told: {role, content}; another list for each conversation
    this.controller = null; // of the answer under way
    this.tip = new Tip(byId("tip"));
    this.log = byId("log");
    this.input = byId("message");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.controller) this.stop();
      else this.send(this.input.value);
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.controller) this.send(this.input.value);
    });
    this.input.addEventListener("input", () => this.fit());
    byId("clear").addEventListener("click", () => this.clear());
    for (const name of ["temperature", "top_p"]) {
      const show = () => (byId(`${name}-value`).textContent = Number(byId(name).value).toFixed(2));
      byId(name).addEventListener("input", show);
      show();
    }
    byId("shade").addEventListener("change", (event) => this.log.classList.toggle("shaded", event.target.checked));
    this.empty();
  }

  showModels(models) {
    choices(byId("model"), models.map(({ id }) => id));
    byId("model-field").hidden = models.length < 2;
  }

  empty() {
    const buttons = EXAMPLES.map((text) => {
      const button = make("button", { type: "button", class: "quiet", textContent: text });
      button.addEventListener("click", () => this.send(text));
      return make("li", {}, button);
    });
    const heading = make("h2", { textContent: "What shall we weave?" });
    const text = make("p", { textContent: "The conversation stays in this page. Point at a word to see its odds." });
    this.log.replaceChildren(make("div", { class: "empty" }, heading, text, make("ul", {}, ...buttons)));
  }

  clear() {
    this.stop();
    this.messages = [];
    this.tip.hide();
    this.empty();
    this.input.focus();
  }

  stop() {
    this.controller?.abort();
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 200)}px`;
  }

  async send(text) {
    if (!text.trim() || this.controller) return;
    if (!this.messages.length) this.log.replaceChildren();
    this.input.value = "";
    this.fit();
    this.messages.push({ role: "user", content: text });
    this.log.append(make("article", { class: "turn user" }, make("p", { textContent: text })));
    const turn = this.turn();
    this.log.append(turn.article);
    this.follow(true);
    this.working(true);
    try {
      await this.stream(turn);
    } finally {
      this.working(false);
    }
  }

  turn() {
    const body = make("div", { class: "answer", tabIndex: 0, role: "group", "aria-label": "Answer" });
    body.setAttribute("aria-live", "polite");
    body.setAttribute("aria-busy", "true");
    const meta = make("p", { class: "meta" });
    const name = make("h3", { textContent: byId("model").value || "model" });
    const growing = new Growing(body);
    this.tip.watch(body, () => growing.tokens);
    const article = make("article", { class: "turn" }, name, body, meta);
    return { article, body, meta, growing, thought: null, messages: this.messages };
  }

  /** The element for a turn's reasoning: above the answer, and collapsible. */
  thinking(turn) {
    if (turn.thought) return turn.thought;
    const body = make("div", { class: "answer", tabIndex: 0, role: "group", "aria-label": "Reasoning" });
    const details = make("details", { class: "thought", open: true }, make("summary", { textContent: "Reasoning" }), body);
    turn.body.before(details);
    turn.thought = new Growing(body);
    this.tip.watch(body, () => turn.thought.tokens);
    return turn.thought;
  }

  /** Streams one answer into `turn`, and shows there how it ended. */
  async stream(turn) {
    const began = performance.now();
    const found = { first: 0, last: 0, usage: null, count: 0, reason: "" };
    let problem = "";
    try {
      const body = JSON.stringify(this.body());
      const response = await request("v1/chat/completions", { method: "POST", body, signal: this.controller.signal });
      for await (const event of events(response)) {
        found.usage = event.usage ?? found.usage;
        const choice = event.choices[0];
        if (!choice) continue;
        found.reason = ENDED[choice.finish_reason] ?? choice.finish_reason ?? found.reason;
        const entries = choice.logprobs?.content ?? [];
        const thought = choice.delta.reasoning ?? choice.delta.reasoning_content ?? "";
        if (!entries.length && !choice.delta.content && !thought) continue;
        found.last = performance.now();
        found.first ||= found.last;
        found.count += entries.length || 1;
        if (thought) this.thinking(turn).add(thought, entries);
        else turn.growing.add(choice.delta.content ?? "", entries);
        this.follow();
      }
    } catch (error) {
      if (error.name === "AbortError") found.reason = "stopped";
      else if (error instanceof Problem) problem = error.message;
      else throw error;
    }
    turn.thought?.draw();
    turn.growing.draw();
    turn.body.setAttribute("aria-busy", "false");
    this.finish(turn, found, began, problem);
  }

  finish(turn, found, began, problem) {
    const { text } = turn.growing;
    if (problem) turn.article.append(make("p", { class: "problem", role: "alert", textContent: problem }));
    if (text) turn.messages.push({ role: "assistant", content: text });
    else turn.messages.pop(); // a question without an answer is not told again
    const facts = [];
    if (found.first) {
      const rate = (found.count - 1) / ((found.last - found.first) / 1000);
      const cached = found.usage?.prompt_tokens_details?.cached_tokens;
      facts.push(`${number(found.count)} tokens`);
      if (found.count > 1 && Number.isFinite(rate)) facts.push(`${number(rate)} tokens/s`);
      facts.push(`first after ${duration((found.first - began) / 1000)}`);
      if (found.usage) facts.push(`prompt ${number(found.usage.prompt_tokens)}${cached ? `, ${number(cached)} cached` : ""}`);
    }
    turn.meta.textContent = [...facts, found.reason].filter(Boolean).join(" · ");
    this.follow();
  }

  body() {
    const system = byId("system").value.trim();
    const body = {
      model: byId("model").value || undefined,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
      logprobs: true,
      top_logprobs: TOP_LOGPROBS,
      temperature: Number(byId("temperature").value),
      top_p: Number(byId("top_p").value),
    };
    for (const name of ["top_k", "max_tokens", "seed"]) {
      if (byId(name).value !== "") body[name] = Number(byId(name).value);
    }
    return body;
  }

  /** Scrolls to the end, unless the user has scrolled up. */
  follow(isAlways = false) {
    const { log } = this;
    if (isAlways || log.scrollHeight - log.scrollTop - log.clientHeight < 120) {
      requestAnimationFrame(() => (log.scrollTop = log.scrollHeight));
    }
  }

  working(isWorking) {
    this.controller = isWorking ? new AbortController() : null;
    const button = byId("send");
    button.textContent = isWorking ? "Stop" : "Send";
    button.classList.toggle("stop", isWorking);
  }
}
