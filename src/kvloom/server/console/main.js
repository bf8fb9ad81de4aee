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
const REFUSED = "This key is not accepted.";
const VIEWS = ["chat", "pictures", "live", "config"];

const chat = new Chat();
const pictures = new Pictures();
const live = new Live();
const replicas = new Replicas();
const requests = new Requests();
let timer = 0;
let hasFeed = true; // not on the port beside a management port
let isLoaded = false; // models and configuration

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

/** Asks the server how it is, again and again: for its figures, or on a port without them for its models. */
async function poll() {
  clearTimeout(timer);
  let pauseMs = hasFeed ? POLL_MS : RETRY_MS;
  try {
    await (hasFeed ? loadFeed() : loadModels());
  } catch (error) {
    if (error.status === 401) return; // goes on when there is a key
    if (error.status === 404 && hasFeed) {
      hasFeed = false;
      notice("live-notice", "These figures are served on this server's management port.");
      notice("config-notice", "The configuration is served on this server's management port.");
      pauseMs = 0;
    } else {
      say("lost", error.message.replace(/\.$/, "").toLowerCase());
      pauseMs = RETRY_MS;
    }
  }
  timer = setTimeout(poll, pauseMs);
}

/** Draws the server's figures and, once in each of its lives, its models and configuration. Throws Problem. */
async function loadFeed() {
  const feed = await json("console/feed");
  isLoaded &&= !live.history.hasRestarted(feed);
  pulse(feed);
  live.add(feed, performance.now() / 1000);
  replicas.draw(feed);
  requests.draw(feed);
  if (isLoaded) return;
  drawConfig(await json("console/config"));
  try {
    await loadModels();
  } catch (error) {
    if (error.status !== 404) throw error;
    notice("chat-notice", "Chat is served on this server's other port.");
  }
  isLoaded = true;
}

/** Shows each model in the view for its kind of output. Throws Problem. */
async function loadModels() {
  const { data } = await json("v1/models");
  const painters = data.filter(({ task }) => task === "text-to-image");
  const isChatting = painters.length < data.length;
  chat.showModels(data.filter((model) => !painters.includes(model)));
  pictures.showModels(painters);
  byId("pictures-link").hidden = !painters.length;
  notice("chat-notice", isChatting ? "" : "The models of this server make pictures.");
  if (!isChatting && !location.hash) location.hash = "#pictures";
  if (!hasFeed) say("ready", "");
}

function notice(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = !text;
}

addEventListener("hashchange", route);
addEventListener("needs-key", () => {
  byId("key-problem").textContent = key.get() ? REFUSED : "";
  if (byId("key-form").hidden) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  say("locked", "locked");
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  byId("key-problem").textContent = key.isPossible(given) ? "" : REFUSED;
  if (!key.isPossible(given)) return;
  key.set(given);
  byId("key-form").hidden = true;
  poll();
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
poll();
