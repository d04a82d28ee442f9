// Asks the server what is new and shows it. All text is set as text, never as markup. `watching` holds the settings.
(() => {
  const AXES = { step: "steps", tokens: "tokens", seconds: "minutes of training" };
  const MANY = 8; // runs from which one hover label for all would cover the plot
  const FEW = 5; // lines of a run that are always shown whole
  const DASHES = { dot: "1.5 3", dash: "6 3", dashdot: "6 2 1.5 2", longdash: "10 3" };
  const CROPPED = new Set(["loss", "validation", "grad_norm"]);
  const slot = (name) => document.getElementById(`live-${name}`);
  const runs = new Map();
  const { make, small, fixed, counted, short, clock, share, bar, chip, steps, given, chosen } = runList;
  const page = Math.random().toString(36).slice(2); // tells the server which pages it has answered
  const folded = new Set(); // series that the legend hides
  let axis = "step", logarithmic = false, whole = false, epoch = "", change = 0, lastAnswer = null;

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
      tiles.push(tile("Tokens per second", short(run.speed), given(run.mfu) ? `MFU ${fixed(run.mfu, 3)}` : ""));
      tiles.push(tile("Memory", given(run.memory) ? `${fixed(run.memory, 1)} GiB` : "—", "peak"));
    } else {
      const count = (state) => all.filter((run) => run.state === state).length;
      const words = ["training", "crashed", "quiet", "waiting", "stopped", "imported", "gone"].filter(count).map((state) => `${count(state)} ${state}`);
      const finished = `${count("finished")} of ${trained.length} runs finished`;
      progress = tile("Progress", finished, words.join(", "), bar(done, "", "all runs"));
      const speed = all.filter((run) => run.state === "training").reduce((sum, run) => sum + (run.speed || 0), 0);
      tiles.push(tile("Left", count("training") ? clock(news.left) : "—", "for all runs, at this speed"));
      tiles.push(tile("Tokens per second", speed ? short(speed) : "—", "of all runs under way"));
      const judged = all.filter((run) => run.best !== null).sort((a, b) => a.best - b.best);
      if (judged.length) tiles.push(tile("Lowest validation loss", fixed(judged[0].best, 4), judged[0].name));
    }
    const crash = all.length === 1 && all[0].why ? [make("p", "note crash", `It crashed: ${all[0].why}`)] : [];
    slot("now").replaceChildren(...crash, make("dl", "tiles", progress), make("dl", "tiles", ...tiles));
    runList.update(all, slot("runs"), () => {
      showMessages(news);
      draw();
    });
  }

  function showMessages(news) {
    const most = news.runs.length > 2 ? 2 : Infinity;
    const crashed = (run) => run.state === "crashed";
    const told = news.runs.filter((run) => run.messages.length && chosen(run)).sort((a, b) => crashed(b) - crashed(a));
    const items = told.map((run) => {
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
    const { width = 2, dash = run.dash, opacity = 1, mode = "lines" } = look;
    return {
      x: xs(run, curve), y: values, mode, opacity, meta: { series: run.series }, showlegend: false,
      name: plain(run.name), line: { color: run.colour, width, dash }, marker: { color: run.colour, size: 6 },
      hovertemplate: `%{y:.4~g}<extra>${plain(run.name)}</extra>`, hoverinfo: opacity < 1 ? "skip" : undefined,
    };
  }

  function traces(name) {
    const found = [];
    for (const run of runs.values()) {
      if (!chosen(run) || folded.has(run.series)) continue;
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

  // All cards are shown or hidden before the first plot is drawn: a card that joins a row makes its neighbours narrower.
  function draw() {
    showLegend();
    const lines = new Map(watching.figures.map((name) => [name, traces(name)]));
    for (const [name, data] of lines) slot(name).closest("figure").hidden = data.length === 0;
    for (const [name, data] of lines) {
      const plot = slot(name), loss = name === "loss" || name === "validation";
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

  // A button for every series that has a line; they stay in place, so that the keyboard does not lose them.
  function showLegend() {
    const series = new Map([...runs.values()].filter((run) => run.curves.train.step.length).map((run) => [run.series, run]));
    const shown = [...legend.children].map((button) => button.dataset.series);
    if (shown.join("\n") !== [...series.keys()].join("\n")) legend.replaceChildren(...[...series.values()].map(entry));
    legend.hidden = series.size < 2;
    const here = new Set([...runs.values()].filter(chosen).map((run) => run.series));
    for (const button of legend.children) button.hidden = !here.has(button.dataset.series);
  }
  function entry(run) {
    const button = make("button", "", stroke(run), run.series);
    button.type = "button";
    button.dataset.series = run.series;
    button.setAttribute("aria-pressed", !folded.has(run.series));
    button.addEventListener("click", () => {
      if (!folded.delete(run.series)) folded.add(run.series);
      button.setAttribute("aria-pressed", !folded.has(run.series));
      draw();
    });
    for (const event of ["mouseenter", "focusin"]) button.addEventListener(event, () => residua.highlight(run.series));
    for (const event of ["mouseleave", "focusout"]) button.addEventListener(event, () => residua.highlight());
    return button;
  }
  function stroke(run) {
    const [svg, line] = ["svg", "path"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
    const set = (element, values) => Object.entries(values).forEach(([name, value]) => element.setAttribute(name, value));
    set(svg, { viewBox: "0 0 24 12", width: 24, height: 12, "aria-hidden": "true" });
    set(line, { d: "M0 6h24", stroke: run.colour, "stroke-width": 2, "stroke-dasharray": DASHES[run.dash] || "none" });
    svg.append(line);
    return svg;
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
    slot("axis").replaceChildren(make("div", "axis", label, ...buttons, log, all), legend);
  }

  const legend = make("div", "legend");
  legend.hidden = true;
  legend.setAttribute("role", "group");
  legend.setAttribute("aria-label", "Show or hide");
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
      const answer = await fetch(`news.json?epoch=${epoch}&since=${change}&page=${page}`);
      if (!answer.ok) throw new Error(answer.status);
      const news = await answer.json();
      take(news);
      lastAnswer = new Date();
      lost.hidden = !news.ended;
      if (news.ended) {
        lost.textContent = "The run has ended, and these are its last numbers. `residua watch` and its folder open the page again.";
        return;
      }
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
