// Light or dark theme: the system's setting, or the one saved in this browser. Runs before the page is drawn.
{
  const NAME = "kvloom.theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  let storage = null;
  try {
    storage = localStorage;
  } catch {} // this browser keeps nothing for pages
  const kept = storage?.getItem(NAME);
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => {
      button.setAttribute("aria-label", isDark() ? "Switch to light mode" : "Switch to dark mode");
      button.title = button.getAttribute("aria-label");
    };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      storage?.setItem(NAME, root.dataset.theme);
      name();
    });
    system.addEventListener("change", name);
    name();
  });
}
