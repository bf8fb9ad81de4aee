// Pictures: generates pictures from a prompt and shows previews while they are made.

import { Problem, events, request } from "./api.js";
import { byId, choices, duration, make } from "./dom.js";

const PARTIALS = 3;

export class Pictures {
  constructor() {
    this.controller = null; // of the pictures under way
    byId("painter").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.controller) this.stop();
      else this.paint();
    });
  }

  showModels(models) {
    choices(byId("picture-model"), models.map(({ id }) => id));
    byId("picture-model-field").hidden = models.length < 2;
  }

  stop() {
    this.controller?.abort();
  }

  async paint() {
    const body = this.body();
    const began = performance.now();
    const shown = new Map(); // figures by the picture's number
    byId("picture-problem").textContent = "";
    this.working(true);
    try {
      const options = { method: "POST", body: JSON.stringify(body), signal: this.controller.signal };
      for await (const event of events(await request("v1/images/generations", options))) {
        if (!shown.has(event.index)) shown.set(event.index, this.figure(body.prompt));
        const isDone = event.type === "image_generation.completed";
        this.show(shown.get(event.index), event, isDone ? (performance.now() - began) / 1000 : null);
      }
    } catch (error) {
      if (error instanceof Problem) byId("picture-problem").textContent = error.message;
      else if (error.name !== "AbortError") throw error;
    } finally {
      for (const { figure } of shown.values()) if (figure.getAttribute("aria-busy") === "true") figure.remove();
      this.working(false);
    }
  }

  figure(prompt) {
    const image = make("img", { alt: prompt });
    const caption = make("figcaption", { class: "meta" });
    const figure = make("figure", { "aria-busy": "true" }, image, caption);
    byId("gallery").prepend(figure);
    return { figure, image, caption };
  }

  /** seconds: how long it took; null = the picture is not finished. */
  show({ figure, image, caption }, event, seconds) {
    image.src = `data:image/${event.output_format};base64,${event.b64_json}`;
    if (seconds === null) return;
    figure.setAttribute("aria-busy", "false");
    caption.textContent = `${event.size} · seed ${event.seed} · ${duration(seconds)}`;
  }

  body() {
    const body = { prompt: byId("picture-prompt").value, stream: true, partial_images: PARTIALS };
    const model = byId("picture-model").value;
    if (model) body.model = model;
    if (byId("picture-size").value) body.size = byId("picture-size").value;
    for (const [name, id] of [["n", "count"], ["num_inference_steps", "steps"], ["seed", "seed"]]) {
      const { value } = byId(`picture-${id}`);
      if (value !== "") body[name] = Number(value);
    }
    return body;
  }

  working(isWorking) {
    this.controller = isWorking ? new AbortController() : null;
    byId("paint").textContent = isWorking ? "Stop" : "Paint";
    byId("paint").classList.toggle("stop", isWorking);
  }
}
