"use strict";
// Draws the figures, follows the light or dark preference, and runs the tabs. Figures in hidden tabs wait until shown.
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const themesElement = document.getElementById("themes");
const themes = themesElement ? JSON.parse(themesElement.textContent) : {};
const themeButton = document.getElementById("theme");
const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const PAPER_WIDTH = 660;
let paper = false;

const themeName = () => (paper ? "light" : root.dataset.theme || (prefersDark.matches ? "dark" : "light"));
const style = () => (paper ? "paper" : themeName());
const plots = () => document.querySelectorAll(".plot");

function draw(plot) {
  if (plot.drawnAs === style()) return;
  if (!plot.figure) {
    const script = plot.querySelector("script");
    plot.figure = JSON.parse(script.textContent);
    script.remove();
  }
  plot.drawnAs = style();
  const layout = { ...plot.figure.layout, template: themes[themeName()] };
  if (paper) layout.width = PAPER_WIDTH;
  Plotly.react(plot, plot.figure.data, layout, options);
}

function drawVisible() {
  for (const plot of plots()) if (!plot.closest("[hidden]")) draw(plot);
}

function restyle() {
  themeButton.textContent = themeName() === "dark" ? "Light" : "Dark";
  drawVisible();
}

function select(tab) {
  const tabs = [...tab.parentElement.querySelectorAll("[role=tab]")];
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  drawVisible();
}

for (const list of document.querySelectorAll("[role=tablist]")) {
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) select(tab);
  });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tabs = [...list.querySelectorAll("[role=tab]")];
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.focus();
    select(next);
  });
}

themeButton.addEventListener("click", () => {
  root.dataset.theme = themeName() === "dark" ? "light" : "dark";
  restyle();
});
prefersDark.addEventListener("change", restyle);

// On paper: light, every tab shown, drawn for a narrow page, every definition open.
let folded = [];
addEventListener("beforeprint", () => {
  paper = true;
  folded = [...document.querySelectorAll("[role=tabpanel][hidden]")];
  for (const panel of folded) panel.hidden = false;
  for (const detail of document.querySelectorAll("details")) detail.open = true;
  drawVisible();
});
addEventListener("afterprint", () => {
  paper = false;
  for (const panel of folded) panel.hidden = true;
  drawVisible();
});

const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  },
  { rootMargin: "-10% 0px -70% 0px" },
);
for (const section of document.querySelectorAll("main section")) seen.observe(section);
restyle();
