// Requests to this server: the key, errors as one line, and server-sent events.

const KEY = "kvloom.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** A failed request: the reason in one line; `status` 0 = there was no answer. */
export class Problem extends Error {
  constructor(message, status = 0) {
    super(message.split("\n")[0]);
    this.status = status;
  }
}

/** fetch with the key. Throws Problem, or AbortError if `options.signal` is aborted. */
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (options.body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401) window.dispatchEvent(new Event("needs-key"));
  throw new Problem(await complaint(response), response.status);
}

export const json = async (path, options) => (await request(path, options)).json();

async function complaint(response) {
  try {
    const { error } = await response.json();
    return error.message ?? error;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** Yields the JSON of each event up to [DONE]. Throws Problem for an error event, or if the stream ends before [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The connection to the server broke off.");
    }
    if (part.done) throw new Problem("The answer broke off.");
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem(event.error.message ?? String(event.error));
      yield event;
    }
  }
}
