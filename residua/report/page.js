"use strict";
// Unpacks plotly, draws the figures, follows the light or dark preference, and runs tabs, legends, highlights and sorting.
// A figure that is hidden in a tab or a fold waits until it is shown. `residua.redraw` replaces a figure's data (live pages).
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const themesElement = document.getElementById("themes");
const themes = themesElement ? JSON.parse(themesElement.textContent) : {};
const themeButton = document.getElementById("theme");
const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const PAPER_WIDTH = 660;
const HIDDEN = "[hidden], details:not([open])";
let paper = false;

const themeName = () => root.dataset.theme || (prefersDark.matches ? "dark" : "light");
const style = () => (paper ? "paper" : themeName());
const plots = () => document.querySelectorAll(".plot");
const seriesOf = (trace) => trace?.meta?.series;

async function unpack() {
  const packed = document.getElementById("plotly");
  if (!packed) return false;
  try {
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    packed.remove();
    return true;
  } catch {
    for (const plot of plots()) {
      const words = document.createElement("p");
      words.className = "unseen";
      words.textContent = `This browser is too old to draw the figure. ${plot.getAttribute("aria-label")}`;
      plot.append(words);
    }
    return false;
  }
}

function draw(plot) {
  if (plot.drawnAs === style() || !window.Plotly) return;
  if (!plot.figure) {
    const script = plot.querySelector("script");
    plot.figure = JSON.parse(script.textContent);
    script.remove();
  }
  const first = !plot.drawnAs;
  plot.drawnAs = style();
  const layout = { ...plot.figure.layout, template: themes[style()] };
  if (paper) layout.width = PAPER_WIDTH;
  Plotly.react(plot, plot.figure.data, layout, options);
  if (!first) return;
  for (const svg of plot.querySelectorAll("svg.main-svg")) svg.setAttribute("aria-hidden", "true"); // the label says it
  plot.on("plotly_hover", (event) => highlight(seriesOf(event.points[0]?.data)));
  plot.on("plotly_unhover", () => highlight());
}

function drawVisible() {
  for (const plot of plots()) if (!plot.closest(HIDDEN)) draw(plot);
}

function redraw(plot, figure) {
  plot.figure = figure;
  plot.querySelector("script")?.remove();
  const known = plot.drawnAs;
  plot.drawnAs = known ? "old" : undefined;
  if (!plot.closest(HIDDEN)) draw(plot);
}

function restyle() {
  themeButton.textContent = themeName() === "dark" ? "Light" : "Dark";
  drawVisible();
}

// A series is seen everywhere at once: other lines fade, its rows and legend entries are marked. No name: all as before.
function highlight(name) {
  const known = name !== undefined && document.querySelector(`[data-series="${CSS.escape(name)}"]`);
  for (const marked of document.querySelectorAll("[data-series]")) {
    marked.classList.toggle("seen", Boolean(known) && marked.dataset.series === name);
  }
  for (const plot of plots()) {
    const groups = [...plot.querySelectorAll("g.trace")];
    const here = known && groups.some((group) => seriesOf(group.__data__?.[0]?.trace) === name);
    for (const group of groups) {
      const series = seriesOf(group.__data__?.[0]?.trace);
      group.classList.toggle("faint", Boolean(here) && series !== undefined && series !== name);
    }
  }
}

for (const marked of document.querySelectorAll("[data-series]")) {
  for (const event of ["mouseenter", "focusin"]) marked.addEventListener(event, () => highlight(marked.dataset.series));
  for (const event of ["mouseleave", "focusout"]) marked.addEventListener(event, () => highlight());
}

for (const legend of document.querySelectorAll(".legend")) {
  legend.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    const plot = legend.nextElementSibling;
    if (!button || !plot.figure) return;
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    for (const trace of plot.figure.data) if (seriesOf(trace) === button.dataset.series) trace.visible = shown;
    plot.drawnAs = "old";
    draw(plot);
  });
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

// Sorting: by the cell's key, else by the number its text begins with, else by its text. Cells without a value stay last.
function sortKey(cell) {
  if (cell.dataset.key !== undefined) return Number(cell.dataset.key);
  const text = cell.textContent.trim();
  if (text === "" || text.startsWith("—")) return null;
  const number = parseFloat(text.replace("−", "-").replaceAll(",", ""));
  return Number.isNaN(number) ? text.toLowerCase() : number;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortBy(button) {
  const head = button.closest("th");
  const body = head.closest("table").tBodies[0];
  const before = head.getAttribute("aria-sort");
  const descending = before ? before !== "descending" : head.classList.contains("number");
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...body.rows].map((row) => [sortKey(row.cells[head.cellIndex]), row]);
  const known = rows.filter(([key]) => key !== null);
  known.sort(([a], [b]) => (descending ? compare(b, a) : compare(a, b)));
  for (const [, row] of [...known, ...rows.filter(([key]) => key === null)]) body.append(row);
}

for (const button of document.querySelectorAll(".sort")) button.addEventListener("click", () => sortBy(button));

themeButton.addEventListener("click", () => {
  root.dataset.theme = themeName() === "dark" ? "light" : "dark";
  restyle();
});
prefersDark.addEventListener("change", restyle);
document.addEventListener("toggle", drawVisible, true);

// On paper: black on white, every tab shown, drawn for a narrow page, every fold open.
let opened = [];
addEventListener("beforeprint", () => {
  paper = true;
  opened = [...document.querySelectorAll("[role=tabpanel][hidden], details:not([open])")];
  for (const part of opened) part.localName === "details" ? (part.open = true) : (part.hidden = false);
  drawVisible();
});
addEventListener("afterprint", () => {
  paper = false;
  for (const part of opened) part.localName === "details" ? (part.open = false) : (part.hidden = true);
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
window.residua = { redraw, highlight, compare };
restyle();
unpack().then(drawVisible);
