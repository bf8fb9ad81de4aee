// The table of a fleet's replicas: load, hit rate, moves. Hidden where a model has one engine.

import { byId, make, number } from "./dom.js";

const COLUMNS = ["name", "node", "role", "state", "load", "running", "waiting", "hits"];

function cellsOf(replica) {
  const { prompt_tokens: prompts, cached_tokens: cached } = replica;
  return {
    name: replica.name,
    node: replica.node,
    role: replica.role || "–",
    state: replica.is_ready ? "ready" : "not ready",
    load: number(replica.load),
    running: number(replica.num_running),
    waiting: number(replica.num_waiting),
    hits: prompts ? `${Math.round((100 * cached) / prompts)} %` : "–",
  };
}

export class Replicas {
  constructor() {
    this.body = byId("replicas-body");
  }

  draw(feed) {
    const models = feed.models.filter(({ replicas }) => replicas);
    byId("replicas").hidden = !models.length;
    if (!models.length) return;
    const rows = models.flatMap(({ replicas }) => replicas).map((replica) => {
      const cells = cellsOf(replica);
      return make("tr", {}, ...COLUMNS.map((name) => make("td", { class: `col-${name}`, textContent: cells[name] })));
    });
    this.body.replaceChildren(...rows);
    const sum = (name) => models.reduce((found, model) => found + model[name], 0);
    const lost = sum("lost");
    const moved = sum("moves") === 1 ? "1 request" : `${number(sum("moves"))} requests`;
    byId("replicas-moves").textContent =
      `${moved} went on at another replica${lost ? `; ${number(lost)} could not` : ""}.`;
  }
}
