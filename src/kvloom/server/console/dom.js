// Text is inserted by textContent only, never as HTML.

export const byId = (id) => document.getElementById(id);

/** Creates an element, sets its properties and appends children; `class` and names with a dash are set as attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Offers `values` in a select, "" under the name of `all`; what was chosen stays chosen if it is still offered. */
export function choices(select, values, all = "") {
  const before = [...select.options].map(({ value }) => value);
  if (before.length === values.length && values.every((value, i) => value === before[i])) return;
  const { value: chosen } = select;
  select.replaceChildren(...values.map((value) => make("option", { value, textContent: value || all })));
  if (values.includes(chosen)) select.value = chosen;
}

/** 1234.5 -> "1,235"; small numbers keep one decimal. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const digits = Math.abs(value) < 100 && !Number.isInteger(value) ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Formats seconds: "840 ms", "12.4 s", "3 min 05 s". */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
}
