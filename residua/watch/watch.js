// Asks the server what is new and shows it. All text is set as text, never as markup. `watching` holds the settings.
(() => {
  const AXES = { step: "steps", tokens: "tokens", seconds: "minutes of training" };
  const MANY = 8; // runs from which one hover label for all would cover the plot
  const FEW = 5; // lines of a run that are always shown whole
  const CROPPED = new Set(["loss", "validation", "grad_norm"]);
  const slot = (name) => document.getElementById(`live-${name}`);
  const runs = new Map();
  let axis = "step", logarithmic = false, whole = false, epoch = "", change = 0, lastAnswer = null;

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
  function chip(run) {
    const words = { quiet: `quiet for ${clock(run.age)}`, waiting: "not begun" }[run.state] || run.state;
    return make("span", `chip ${run.state}`, words);
  }
  const steps = (run) => (run.state === "imported" ? "not trained here" : `step ${counted(run.step)}${run.steps ? ` of ${counted(run.steps)}` : ""}`);

  function tile(name, value, detail = "", more = null) {
    return make("div", "tile", make("dt", "", name), make("dd", "", value, small(detail), more));
  }

  function showNow(news) {
    const all = news.runs;
    const trained = all.filter((run) => run.state !== "imported");
    const done = trained.reduce((sum, run) => sum + share(run), 0) / Math.max(1, trained.length);
    const tiles = [];
    let progress;
    if (all.length === 1) {
      const run = all[0];
      const percent = `${Math.floor(100 * share(run))} %`;
      progress = tile("Progress", percent, steps(run), bar(share(run), run.colour, "done"));
      progress.querySelector("dt").append(" ", chip(run));
      tiles.push(tile("Left", run.state === "finished" ? "0:00" : clock(run.left), `${clock(run.seconds)} trained`));
      tiles.push(tile("Training loss", fixed(run.loss, 4), "nats/token, smoothed"));
      const best = run.best !== null && run.best < run.validation ? `best ${fixed(run.best, 4)}` : "nats/token";
      tiles.push(tile("Validation loss", fixed(run.validation, 4), best));
      if (run.bits !== null) tiles.push(tile("Bits per byte", fixed(run.bits, 4), "validation"));
      tiles.push(tile("Tokens per second", short(run.speed), run.mfu === null || run.mfu === undefined ? "" : `MFU ${fixed(run.mfu, 3)}`));
      tiles.push(tile("Memory", run.memory === null || run.memory === undefined ? "—" : `${fixed(run.memory, 1)} GiB`, "peak"));
    } else {
      const count = (state) => all.filter((run) => run.state === state).length;
      const words = ["training", "quiet", "waiting", "stopped", "imported", "gone"].filter(count).map((state) => `${count(state)} ${state}`);
      const finished = `${count("finished")} of ${trained.length} runs finished`;
      progress = tile("Progress", finished, words.join(", "), bar(done, "", "all runs"));
      const speed = all.filter((run) => run.state === "training").reduce((sum, run) => sum + (run.speed || 0), 0);
      tiles.push(tile("Left", count("training") ? clock(news.left) : "—", "for all runs, at this speed"));
      tiles.push(tile("Tokens per second", speed ? short(speed) : "—", "of all runs under way"));
      const judged = all.filter((run) => run.best !== null).sort((a, b) => a.best - b.best);
      if (judged.length) tiles.push(tile("Lowest validation loss", fixed(judged[0].best, 4), judged[0].name));
    }
    slot("now").replaceChildren(make("dl", "tiles", progress), make("dl", "tiles", ...tiles));
    slot("runs").replaceChildren(...(all.length > 1 ? [table(all)] : []));
  }

  function table(all) {
    const heads = [["run", 1], ["state", 1], ["done", 0], ["training loss", 0], ["validation loss", 0],
      ["tokens/s", 0], ["memory", 0], ["trained", 0], ["left", 0]];
    const head = make("tr", "", ...heads.map(([text, words]) => {
      const cell = make("th", words ? "words" : "number", text);
      cell.scope = "col";
      return cell;
    }));
    const rows = all.map((run) => {
      const swatch = make("span", "swatch");
      swatch.style.background = run.colour;
      const name = make("th", "words", swatch, run.name);
      name.scope = "row";
      const cells = [
        make("td", "words", chip(run)),
        make("td", "", steps(run).replace("step ", ""), bar(share(run), run.colour, run.name)),
        make("td", "", fixed(run.loss, 4)),
        make("td", "", fixed(run.validation, 4), small(run.bits === null ? "" : `${fixed(run.bits, 4)} bits/byte`)),
        make("td", "", short(run.speed), small(run.mfu === null || run.mfu === undefined ? "" : `MFU ${fixed(run.mfu, 3)}`)),
        make("td", "", run.memory === null || run.memory === undefined ? "—" : `${fixed(run.memory, 1)} GiB`),
        make("td", "", clock(run.seconds)),
        make("td", "", run.state === "finished" ? "0:00" : clock(run.left)),
      ];
      const row = make("tr", "", name, ...cells);
      row.dataset.series = run.series;
      row.addEventListener("mouseenter", () => residua.highlight(run.series));
      row.addEventListener("mouseleave", () => residua.highlight());
      return row;
    });
    const scroll = make("div", "scroll", make("table", "", make("thead", "", head), make("tbody", "", ...rows)));
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "Runs");
    return scroll;
  }

  function showMessages(news) {
    const most = news.runs.length > 2 ? 2 : Infinity;
    const items = news.runs.filter((run) => run.messages.length).map((run) => {
      const said = make("ul", "", ...run.messages.slice(0, most).map((text) => make("li", "", text)));
      return make("li", "", make("strong", "", run.name), said);
    });
    const logs = news.logs.flatMap((log) => {
      const lines = make("pre", "", log.lines.join("\n"));
      lines.tabIndex = 0;
      return [make("h3", "", `The end of logs/${log.name}`), lines];
    });
    slot("messages").replaceChildren(make("ul", "happened", ...items), ...logs);
  }

  // Plotly reads a little markup in names.
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  function xs(run, curve) {
    if (axis === "seconds") return curve.seconds ? curve.seconds.map((s) => s / 60) : curve.step;
    const last = run.curves.train;
    const size = last.step.length ? last.tokens.at(-1) / last.step.at(-1) : 1; // tokens of a step
    return axis === "tokens" ? curve.step.map((step) => step * size) : curve.step;
  }

  function trace(run, curve, values, look = {}) {
    const { width = 2, dash = "solid", opacity = 1, mode = "lines" } = look;
    return {
      x: xs(run, curve), y: values, mode, opacity, meta: { series: run.series }, showlegend: false,
      name: plain(run.name), line: { color: run.colour, width, dash }, marker: { color: run.colour, size: 6 },
      hovertemplate: `%{y:.4~g}<extra>${plain(run.name)}</extra>`, hoverinfo: opacity < 1 ? "skip" : undefined,
    };
  }

  function traces(name) {
    const found = [];
    for (const run of runs.values()) {
      const { train, validation, experts, telemetry } = run.curves;
      if (name === "loss") {
        if (runs.size === 1) found.push({ ...trace(run, train, train.loss, { width: 1, opacity: 0.35 }), hovertemplate: undefined });
        found.push(trace(run, train, train.smoothed));
      } else if (name === "validation") {
        found.push(trace(run, validation, validation.loss, { mode: validation.step.length < 60 ? "lines+markers" : "lines" }));
      } else if (name === "heaviest") {
        found.push(trace(run, experts, experts.heaviest), trace(run, experts, experts.lightest, { dash: "dot" }));
      } else if (name === "peak" || name === "sink_ratio") {
        found.push(trace(run, telemetry, telemetry[name]));
      } else {
        found.push(trace(run, train, train[name]));
      }
    }
    return found.filter((line) => line.y.some((value) => value !== null));
  }

  // Shows the later part well: the first fifth of a run, where the loss falls fastest, does not set the scale.
  function range(lines) {
    let low = Infinity, high = -Infinity;
    for (const { y } of lines) {
      const values = y.filter((value) => value !== null);
      const from = values.length < FEW ? 0 : Math.floor(values.length / 5);
      for (const value of values) low = Math.min(low, value);
      for (const value of values.slice(from)) high = Math.max(high, value);
    }
    if (!(high > low)) return undefined;
    const ends = [low - 0.05 * (high - low), high + 0.05 * (high - low)];
    return logarithmic ? ends.map((end, i) => Math.log10(end > 0 ? end : [low, high][i])) : ends;
  }

  function draw() {
    for (const name of watching.figures) {
      const plot = slot(name), data = traces(name);
      plot.closest("figure").hidden = data.length === 0;
      const loss = name === "loss" || name === "validation";
      residua.redraw(plot, {
        data,
        layout: {
          height: plot.clientHeight || 300, margin: { l: 60, r: 16, t: 12, b: 46 }, showlegend: false, uirevision: `${axis}${logarithmic}${whole}`,
          hovermode: runs.size <= MANY ? "x unified" : "closest", xaxis: { title: { text: AXES[axis] }, rangemode: "tozero" },
          yaxis: {
            type: (loss && logarithmic) || name === "peak" ? "log" : "linear", rangemode: loss ? "normal" : "tozero", exponentformat: name === "lr" ? "e" : "SI",
            range: CROPPED.has(name) && !whole && (loss || !logarithmic) ? range(data) : undefined,
          },
        },
      });
    }
  }

  function chooser() {
    const label = make("span", "", "Over");
    const buttons = Object.entries({ step: "steps", tokens: "tokens", seconds: "time" }).map(([key, words]) => {
      const button = make("button", "", words);
      button.addEventListener("click", () => {
        axis = key;
        press();
        draw();
      });
      button.dataset.axis = key;
      return button;
    });
    const log = make("button", "", "logarithmic loss"), all = make("button", "", "whole curves");
    log.addEventListener("click", () => {
      logarithmic = !logarithmic;
      press();
      draw();
    });
    all.addEventListener("click", () => {
      whole = !whole;
      press();
      draw();
    });
    for (const button of [...buttons, log, all]) button.type = "button";
    const press = () => {
      for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.axis === axis);
      log.setAttribute("aria-pressed", logarithmic);
      all.setAttribute("aria-pressed", whole);
    };
    press();
    slot("axis").replaceChildren(make("div", "axis", label, ...buttons, log, all));
  }

  const lost = make("p", "note lost");
  lost.setAttribute("role", "status");
  lost.hidden = true;
  document.querySelector("main").prepend(lost);

  function take(news) {
    const curves = new Map([...runs].map(([name, run]) => [name, run.curves]));
    const moved = news.runs.length !== runs.size || news.runs.some((run) => run.curves);
    runs.clear();
    for (const run of news.runs) runs.set(run.name, { ...run, curves: run.curves || curves.get(run.name) });
    [epoch, change] = [news.epoch, news.change];
    document.querySelector("h1").textContent = document.title = news.title;
    document.querySelector(".lead").textContent = `As of ${new Date().toLocaleTimeString("en-GB")}, by this computer's clock.`;
    showNow(news);
    showMessages(news);
    if (moved) draw();
    document.documentElement.dataset.change = change;
  }

  async function poll() {
    try {
      const answer = await fetch(`news.json?epoch=${epoch}&since=${change}`);
      if (!answer.ok) throw new Error(answer.status);
      take(await answer.json());
      lastAnswer = new Date();
      lost.hidden = true;
    } catch (problem) {
      if (!(problem instanceof TypeError) && !/^\d+$/.test(problem.message)) console.error(problem);
      const since = lastAnswer ? ` since ${lastAnswer.toLocaleTimeString("en-GB")}` : "";
      lost.textContent = `No answer${since}: residua watch has ended, or the tunnel to it is down. What you see is the last state.`;
      lost.hidden = false;
    }
    setTimeout(poll, 1000 * watching.interval * (document.hidden ? 5 : 1));
  }

  chooser();
  poll();
})();
