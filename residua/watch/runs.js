// The runs as a table that sorts and filters, and the small pieces that `watch.js` builds its tiles of.
const runList = (() => {
  const STATES = ["crashed", "stopped", "gone", "quiet", "training", "waiting", "finished", "imported"]; // worst first
  const FILTERED = 4; // runs from which the table has a filter
  function make(tag, className = "", ...content) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.append(...content.filter((part) => part !== null));
    return element;
  }
  const small = (text) => (text ? make("small", "", text) : null);
  const fixed = (value, digits) => (value === null || value === undefined ? "—" : value.toFixed(digits));
  const counted = (number) => number.toLocaleString("en");
  function short(number) {
    if (number === null || number === undefined) return "—";
    for (const [size, letter] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
      if (number >= size) return `${(number / size).toPrecision(3)}${letter}`;
    }
    return number.toPrecision(3);
  }
  function clock(seconds) {
    if (seconds === null || seconds === undefined) return "—";
    const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  }
  const share = (run) => (["finished", "imported"].includes(run.state) ? 1 : run.steps ? Math.min(1, run.step / run.steps) : 0);

  function bar(fraction, colour, label) {
    const filled = make("b");
    filled.style.width = `${(100 * fraction).toFixed(1)}%`;
    const outer = make("div", "bar", filled);
    if (colour) outer.style.setProperty("--own", colour);
    outer.setAttribute("role", "img");
    outer.setAttribute("aria-label", `${label}: ${Math.round(100 * fraction)} percent`);
    return outer;
  }
  const said = (state) => (state === "waiting" ? "not begun" : state);
  function chip(run) {
    return make("span", `chip ${run.state}`, run.state === "quiet" ? `quiet for ${clock(run.age)}` : said(run.state));
  }
  const steps = (run) => (run.state === "imported" ? "not trained here" : `step ${counted(run.step)}${run.steps ? ` of ${counted(run.steps)}` : ""}`);
  const given = (value) => value !== null && value !== undefined;

  // title, whether it holds words, the value to sort by, the cell
  const COLUMNS = [
    ["run", true, (run) => run.name, null],
    ["state", true, (run) => STATES.indexOf(run.state), (run) => make("td", "words", chip(run), why(run))],
    ["done", false, share, (run) => make("td", "", steps(run).replace("step ", ""), bar(share(run), run.colour, run.name))],
    ["training loss", false, (run) => run.loss, (run) => make("td", "", fixed(run.loss, 4))],
    ["validation loss", false, (run) => run.validation,
      (run) => make("td", "", fixed(run.validation, 4), small(given(run.bits) ? `${fixed(run.bits, 4)} bits/byte` : ""))],
    ["tokens/s", false, (run) => run.speed, (run) => make("td", "", short(run.speed), small(given(run.mfu) ? `MFU ${fixed(run.mfu, 3)}` : ""))],
    ["memory", false, (run) => run.memory, (run) => make("td", "", given(run.memory) ? `${fixed(run.memory, 1)} GiB` : "—")],
    ["trained", false, (run) => run.seconds, (run) => make("td", "", clock(run.seconds))],
    ["left", false, left, (run) => make("td", "", clock(left(run)))],
  ];
  function left(run) {
    return run.state === "finished" ? 0 : run.left;
  }
  function why(run) {
    if (!run.why) return null;
    const words = make("small", "why", run.why);
    words.title = run.why;
    return words;
  }

  let all = [], query = "", state = "", sorted = null, descending = false, changed = () => {};
  const chosen = (run) => run.name.toLowerCase().includes(query) && (state === "" || run.state === state);

  const search = make("input");
  search.type = "search";
  search.placeholder = "name";
  search.setAttribute("aria-label", "Show runs whose name contains");
  search.addEventListener("input", () => {
    query = search.value.trim().toLowerCase();
    choose();
  });
  const buttons = new Map(["", ...STATES].map((name) => {
    const button = make("button");
    button.type = "button";
    button.addEventListener("click", () => {
      state = name;
      choose();
    });
    return [name, button];
  }));
  const number = make("span");
  number.setAttribute("role", "status");
  const filter = make("div", "axis", make("span", "", "Show"), search, ...buttons.values(), number);

  const heads = COLUMNS.map(([title, words], index) => {
    const button = make("button", "sort", title);
    button.type = "button";
    button.addEventListener("click", () => {
      descending = sorted === index ? !descending : false;
      sorted = index;
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      heads[index].setAttribute("aria-sort", descending ? "descending" : "ascending");
      show();
    });
    const head = make("th", words ? "words" : "number", button);
    head.scope = "col";
    return head;
  });
  const body = make("tbody");
  const scroll = make("div", "scroll", make("table", "", make("thead", "", make("tr", "", ...heads)), body));
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", "Runs");

  function row(run) {
    const swatch = make("span", "swatch");
    swatch.style.background = run.colour;
    const name = make("th", "words", swatch, run.name);
    name.scope = "row";
    const found = make("tr", "", name, ...COLUMNS.slice(1).map(([, , , cell]) => cell(run)));
    found.dataset.series = run.series;
    found.addEventListener("mouseenter", () => residua.highlight(run.series));
    found.addEventListener("mouseleave", () => residua.highlight());
    return found;
  }

  // Runs without a value in the column stay last.
  function inOrder(runs) {
    if (sorted === null) return runs;
    const key = COLUMNS[sorted][2], sign = descending ? -1 : 1;
    return [
      ...runs.filter((run) => given(key(run))).sort((a, b) => sign * residua.compare(key(a), key(b))),
      ...runs.filter((run) => !given(key(run))),
    ];
  }

  function show() {
    const runs = all.filter(chosen);
    body.replaceChildren(...inOrder(runs).map(row));
    number.textContent = runs.length === all.length ? "" : `${runs.length} of ${all.length} runs`;
    filter.hidden = all.length < FILTERED;
    for (const [name, button] of buttons) {
      const count = name === "" ? all.length : all.filter((run) => run.state === name).length;
      button.textContent = `${name === "" ? "all" : said(name)} ${count}`;
      button.hidden = count === 0 && name !== state;
      button.setAttribute("aria-pressed", name === state);
    }
  }

  function choose() {
    show();
    changed();
  }

  // Shows the table in `place`, for more than one run; `then` is called when another choice of runs is to be drawn.
  function update(runs, place, then) {
    [all, changed] = [runs, then];
    show();
    if (runs.length > 1 && !place.contains(scroll)) place.replaceChildren(filter, scroll);
    if (runs.length < 2) place.replaceChildren();
  }

  return { update, chosen, make, small, fixed, counted, short, clock, share, bar, chip, steps, given };
})();
