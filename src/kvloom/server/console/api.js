// Requests to this server: the key, errors as one line, and server-sent events.

const KEY = "kvloom.key";
const LIMIT_MS = 10_000; // for answers that are not streamed

let storage = null;
try {
  storage = sessionStorage;
} catch {} // this browser keeps nothing for pages
let current = storage?.getItem(KEY) ?? "";

export const key = {
  get: () => current,
  set: (value) => {
    current = value;
    storage?.setItem(KEY, value);
  },
  /** Whether a header can carry `value`; no server has other keys. */
  isPossible: (value) => /^[!-~]+$/.test(value),
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
    throw new Problem(error.name === "TimeoutError" ? "The server does not answer." : "The server cannot be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401) window.dispatchEvent(new Event("needs-key"));
  throw new Problem(await complaint(response), response.status);
}

/** The JSON at `path`. Throws Problem, also if it has not come in time. */
export async function json(path) {
  const response = await request(path, { signal: AbortSignal.timeout(LIMIT_MS) });
  return read(await response.text().catch(() => ""));
}

function read(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Problem("The server's answer cannot be read.");
  }
}

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
      const event = read(data);
      if (event.error) throw new Problem(event.error.message ?? String(event.error));
      yield event;
    }
  }
}
