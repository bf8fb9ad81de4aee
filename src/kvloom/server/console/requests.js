// The table of running requests, with a button that ends one. Rows are updated in place, so that keyboard focus is kept.

import { request } from "./api.js";
import { byId, duration, make, number } from "./dom.js";

const COLUMNS = ["id", "model", "state", "prompt_tokens", "generated", "age_s", "client"];
const FORMAT = { prompt_tokens: number, generated: number, age_s: duration, client: (name) => name || "–" };

export class Requests {
  constructor() {
    this.rows = new Map(); // key -> {row, cells, button}
    this.body = byId("requests-body");
  }

  draw(feed) {
    const seen = new Set();
    for (const item of feed.requests) {
      let key = item.id;
      while (seen.has(key)) key += "'"; // several may run under one id
      seen.add(key);
      this.show(this.rows.get(key) ?? this.add(key, item.id), item);
    }
    for (const [key, { row, button }] of this.rows) {
      if (seen.has(key)) continue;
      if (button === document.activeElement) byId("requests-title").focus();
      row.remove();
      this.rows.delete(key);
    }
    const isEmpty = feed.requests.length === 0;
    byId("requests-table").hidden = isEmpty;
    byId("requests-empty").hidden = !isEmpty;
    const more = feed.num_requests - feed.requests.length;
    byId("requests-more").textContent = more > 0 ? `and ${number(more)} younger ones` : "";
  }

  add(key, id) {
    const cells = Object.fromEntries(COLUMNS.map((name) => [name, make("td", { class: `col-${name}` })]));
    const button = make("button", { type: "button", class: "small", textContent: "Cancel" });
    button.setAttribute("aria-label", `Cancel request ${id}`);
    button.addEventListener("click", () => this.cancel(id, button));
    const row = make("tr", {}, ...Object.values(cells), make("td", { class: "col-end" }, button));
    this.body.append(row);
    const made = { row, cells, button };
    this.rows.set(key, made);
    return made;
  }

  show({ cells, button }, item) {
    for (const name of COLUMNS) {
      const text = (FORMAT[name] ?? String)(item[name]);
      if (cells[name].textContent !== text) cells[name].textContent = text;
    }
    cells.id.title = item.id;
    cells.state.dataset.state = item.state;
    if (item.state === "stopping") button.disabled = true;
  }

  async cancel(id, button) {
    button.disabled = true;
    byId("requests-problem").textContent = "";
    try {
      await request(`console/requests?id=${encodeURIComponent(id)}`, { method: "DELETE" });
    } catch (error) {
      if (error.status === 404) return; // it has just ended by itself
      button.disabled = false;
      byId("requests-problem").textContent = error.message;
    }
  }
}
