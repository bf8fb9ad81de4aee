// The page: selects the view, asks for the key, and polls the server for live figures.

import { json, key } from "./api.js";
import { Chat } from "./chat.js";
import { drawConfig } from "./config.js";
import { byId, number } from "./dom.js";
import { Live } from "./live.js";
import { Pictures } from "./pictures.js";
import { Replicas } from "./replicas.js";
import { Requests } from "./requests.js";

const POLL_MS = 1000;
const RETRY_MS = 3000;
const VIEWS = ["chat", "pictures", "live", "config"];

const chat = new Chat();
const pictures = new Pictures();
const live = new Live();
const replicas = new Replicas();
const requests = new Requests();
let timer = 0;

function route() {
  const view = VIEWS.find((name) => `#${name}` === location.hash) ?? VIEWS[0];
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  live.draw();
  if (view === "chat") byId("message").focus();
}

function say(state, text) {
  byId("pulse").dataset.state = state;
  byId("pulse-text").textContent = text;
}

function pulse(feed) {
  const models = [...feed.models, ...feed.pictures];
  const isReady = models.every((model) => model.is_ready);
  const state = feed.is_draining ? "stopping" : isReady ? "ready" : "not ready";
  const running = models.reduce((sum, model) => sum + model.num_running, 0);
  say(state, feed.is_draining || !isReady ? state : running ? `${number(running)} running` : "ready");
}

async function poll() {
  clearTimeout(timer);
  let pauseMs = POLL_MS;
  try {
    const feed = await json("console/feed");
    pulse(feed);
    live.add(feed, performance.now() / 1000);
    replicas.draw(feed);
    requests.draw(feed);
  } catch (error) {
    if (error.status === 401) return; // goes on when there is a key
    if (error.status === 404) {
      say("ready", "");
      notice("live-notice", "These figures are served on this server's management port.");
      return;
    }
    say("lost", error.message.replace(/\.$/, "").toLowerCase());
    pauseMs = RETRY_MS;
  }
  timer = setTimeout(poll, pauseMs);
}

function notice(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = !text;
}

/** Loads the list of models and shows each in the view for its kind of output. Throws Problem. */
async function loadModels() {
  const { data } = await json("v1/models");
  const painters = data.filter(({ task }) => task === "text-to-image");
  chat.showModels(data.filter((model) => !painters.includes(model)));
  pictures.showModels(painters);
  byId("pictures-link").hidden = !painters.length;
  if (painters.length < data.length) return;
  notice("chat-notice", "The models of this server make pictures.");
  if (!location.hash) location.hash = "#pictures";
}

/** Starts everything that needs a valid key. */
async function begin() {
  byId("key-form").hidden = true;
  notice("chat-notice", "");
  notice("config-notice", "");
  poll();
  loadModels().catch((error) => {
    if (error.status === 401) return;
    notice("chat-notice", error.status === 404 ? "Chat is served on this server's other port." : error.message);
  });
  json("console/config").then(drawConfig, (error) => {
    if (error.status === 404) notice("config-notice", "The configuration is served on this server's management port.");
    else if (error.status !== 401) notice("config-notice", error.message);
  });
}

addEventListener("hashchange", route);
addEventListener("needs-key", () => {
  byId("key-problem").textContent = key.get() ? "This key is not accepted." : "";
  if (byId("key-form").hidden) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  say("locked", "locked");
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  begin();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  chat.tip.hide();
  chat.stop();
  pictures.stop();
});
byId("settings-toggle").addEventListener("click", (event) => {
  const isOpen = byId("chat").classList.toggle("with-settings");
  event.currentTarget.setAttribute("aria-expanded", String(isOpen));
});
if (matchMedia("(min-width: 60rem)").matches) byId("settings-toggle").click();

route();
begin();
