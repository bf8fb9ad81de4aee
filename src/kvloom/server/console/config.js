// The server's configuration.

import { byId, make, number } from "./dom.js";

export function drawConfig({ version, server, models, keys }) {
  byId("config-groups").replaceChildren(
    group("Server", { version, ...server }, keys),
    ...models.map((model) => group(`Model ${model.name}`, model, keys)),
  );
}

function group(title, values, keys) {
  const rows = Object.entries(values).flatMap(([name, value]) => [
    make("dt", { textContent: `${name} ${keys[name] ?? ""}` }),
    make("dd", { class: isUnset(value) ? "unset" : "", textContent: shown(value) }),
  ]);
  return make("section", { class: "panel" }, make("h2", { textContent: title }), make("dl", {}, ...rows));
}

const isUnset = (value) => value === null || value === "";

function shown(value) {
  if (isUnset(value)) return "not set";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" && value >= 1e5 ? number(value) : String(value);
}
