"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const state = { table: 0, measure: 0, hidden: new Set() };
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star"];
  const SVG_DASHES = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" };
  const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"]
    .map((colour, k, all) => [k / (all.length - 1), colour]);

  // Small makers.

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false) node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Names, numbers and light colours are those of cfl/reporting/line_styles.py, which chooses: pictures look the same.
  const style = (label) => {
    const [colour, dash, marker] = data.styles[label];
    return { colour: css(`--c${colour}`), dash: DASHES[dash], symbol: SYMBOLS[marker] };
  };
  const transparent = (hex, alpha) => `rgba(${[1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)).join(",")},${alpha})`;
  // Plotly reads some tags and entities in texts; names are taken literally.
  const literal = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const ofSeeds = (count, seeds) => (count === seeds ? "" : ` (${count} of ${seeds})`);
  const brief = (text) => (text.length <= 16 ? text : `${text.slice(0, 15)}…`);
  function swatch(label) {
    const { colour, dash } = style(label);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "swatch");
    svg.setAttribute("viewBox", "0 0 22 12");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(svg.namespaceURI, "line");
    Object.entries({ x1: 1, x2: 21, y1: 6, y2: 6, stroke: colour, "stroke-width": 3.4, "stroke-dasharray": SVG_DASHES[dash] })
      .forEach(([key, value]) => line.setAttribute(key, value));
    svg.append(line);
    return svg;
  }
  // The rule of cfl/reporting/rounding.py, and so of all tables and pictures: half away from zero, after rounding errors.
  const formats = new Map(); // making one takes longer than using it a dozen times
  function rounded(value, decimals, signed = false) {
    if (!formats.has(decimals)) formats.set(decimals, new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
    const text = formats.get(decimals).format(Math.abs(Number(value.toPrecision(12))));
    return (value < 0 && /[1-9]/.test(text) ? "−" : signed ? "+" : "") + text;
  }
  function number(value, figure, signed = figure.signed) {
    return value === null || value === undefined ? "–" : rounded(value / figure.divisor, figure.decimals, signed);
  }
  const table = () => data.tables[state.table];
  const measure = () => data.measures[state.measure];
  const figure = (key) => data.figures.find((one) => one.key === key);
  const mainFigure = () => data.curves.map((one) => figure(one.key)).find((one) => one && table().rows.some((row) => row.figures[one.key]));
  const mainName = () => mainFigure().key.toUpperCase();
  const shownRows = () => table().rows.filter((row) => !state.hidden.has(row.label));
  const nameOf = (row) => data.labels[row.label];

  // Charts: what is off screen is drawn when it comes into view.

  let charts = [];
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((one) => one.node === entry.target);
      if (chart) { chart.visible = entry.isIntersecting; draw(chart); }
    }
  }, { rootMargin: "400px" });
  function draw(chart) {
    if (!chart.visible || !chart.stale) return;
    chart.stale = false;
    const { traces, layout, rows } = chart.content();
    if (rows) chart.node.style.height = `${Math.max(23, 5 + 1.4 * rows)}rem`;
    Plotly.react(chart.node, traces, framed(layout), {
      // Named one by one: the library's own choice has a button that would send the data to a web service.
      displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    });
  }
  function refresh() { for (const chart of charts) { chart.stale = true; draw(chart); } }
  function plot(content) {
    const node = make("div", { class: "plot" });
    charts.push({ node, content, stale: true, visible: false });
    observer.observe(node);
    return node;
  }
  function framed(layout) {
    const axis = (own) => ({
      gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true, ...own,
      title: { text: own && own.title, standoff: 8, font: { size: 12 } },
    });
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { color: css("--ink"), size: 12, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, align: "left", namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--faint"), activecolor: css("--ink") },
      margin: { l: 55, r: 15, t: 28, b: 45 },
      ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    };
  }
  function line(row, x, y, extra = {}) {
    const { colour, dash, symbol } = style(row.label);
    return {
      type: "scatter", mode: x.length > 60 ? "lines" : "lines+markers", x, y, name: literal(nameOf(row)), connectgaps: true,
      line: { color: colour, width: 2, dash }, marker: { color: colour, size: 6, symbol }, ...extra,
    };
  }
  function band(row, x, y, std) {
    if (!std) return [];
    const kept = x.map((_, k) => k).filter((k) => y[k] !== null && std[k] !== null);
    const up = kept.map((k) => y[k] + std[k]), down = kept.map((k) => y[k] - std[k]), at = kept.map((k) => x[k]);
    return [{
      type: "scatter", x: [...at, ...at.slice().reverse()], y: [...up, ...down.reverse()], fill: "toself", mode: "lines",
      fillcolor: transparent(style(row.label).colour, 0.16), line: { width: 0 }, hoverinfo: "skip",
    }];
  }
  const spread = (y, std, k, digits) => (y[k] === null ? "" : rounded(y[k], digits) + (std && std[k] !== null ? ` ± ${rounded(std[k], digits)}` : ""));

  function taskAxis(title) {
    const most = Math.max(1, ...table().rows.flatMap((row) => Object.values(row.measures).map((found) => found.tasks)));
    return { title, tickformat: "d", dtick: Math.ceil(most / 20), range: [-0.35, most - 0.65] };
  }

  function overTasks(which) {
    const unit = measure().unit, digits = measure().percent ? 2 : 4, traces = [];
    for (const row of shownRows()) {
      const found = row.measures[measure().key];
      if (!found) continue;
      const y = found[which], std = found[`${which}_std`];
      traces.push(...band(row, found.after, y, std));
      traces.push(line(row, found.after, y, {
        customdata: y.map((_, k) => spread(y, std, k, digits)),
        hovertemplate: `after task %{x}: %{customdata} ${unit}<extra>${literal(nameOf(row))}</extra>`,
      }));
    }
    return { traces, layout: { xaxis: taskAxis("after learning task"), yaxis: { title: `${measure().name} (${unit})` } } };
  }

  // Curves of the chosen measure, or of another one where no row of the table has any of it.
  function curveOf() {
    const chosen = (one) => measure().key.startsWith(one.measure);
    const all = [...data.curves.filter(chosen), ...data.curves.filter((one) => !chosen(one))];
    return all.find(({ key }) => table().rows.some((row) => row.rounds && row.rounds[key])) || all[0];
  }

  function learningCurves(axis) {
    const scale = axis === "uplink_bytes" ? 1e6 : 1, traces = [];
    const titles = { round: "communication round", uplink_bytes: "uplink (MB) of all clients so far", seconds: "seconds so far" };
    const { key, unit } = curveOf(), digits = unit === "%" ? 2 : 4;
    for (const row of shownRows()) {
      const found = row.rounds;
      if (!found || !found[axis] || !found[key]) continue;
      const x = found[axis].map((value) => value / scale);
      traces.push(...band(row, x, found[key], found.std));
      traces.push(line(row, x, found[key], {
        customdata: x.map((_, k) => [found.round[k], spread(found[key], found.std, k, digits)]),
        hovertemplate: `round %{customdata[0]}: %{customdata[1]} ${unit}<extra>${literal(nameOf(row))}</extra>`,
      }));
    }
    return { traces, layout: { xaxis: { title: titles[axis] }, yaxis: { title: `${key.toUpperCase()} (${unit})` } } };
  }

  function againstCost(key) {
    const cost = figure(key), aim = mainFigure(), traces = [], all = [];
    for (const row of shownRows()) {
      const { colour, symbol } = style(row.label);
      const place = table().rows.indexOf(row);
      const own = table().runs.filter((run) => run.row === place && (run.figures[aim.key] ?? null) !== null && run.figures[key] !== null);
      const x = own.map((run) => run.figures[key] / cost.divisor), y = own.map((run) => run.figures[aim.key]);
      all.push(...x);
      const [acc, spent] = [row.figures[aim.key], row.figures[key]];
      if (own.length > 1) traces.push({
        type: "scatter", mode: "markers", x, y, marker: { color: transparent(colour, 0.4), size: 7, symbol },
        text: own.map((run) => `seed ${run.seed}: ${aim.heading} ${number(run.figures[aim.key], aim)}, ${number(run.figures[key], cost)} ${literal(cost.heading)}`), hovertemplate: `%{text}<extra>${literal(nameOf(row))}</extra>`,
      });
      if (!acc || !spent) continue;
      const bar = (values, divisor) => ({ type: "data", array: [values[1] === null ? 0 : values[1] / divisor], visible: values[1] !== null, color: colour, thickness: 1.5, width: 4 });
      traces.push({
        type: "scatter", mode: "markers+text", x: [spent[0] / cost.divisor], y: [acc[0]], error_y: bar(acc, 1), error_x: bar(spent, cost.divisor),
        marker: { color: colour, size: 12, symbol, line: { color: css("--card"), width: 1 } }, name: literal(nameOf(row)),
        text: [shownRows().length <= 12 ? literal(brief(nameOf(row))) : ""], textposition: "top center", textfont: { color: colour, size: 12 }, cliponaxis: false,
        hovertemplate: `${aim.heading} ${number(acc[0], aim)}${acc[1] === null ? "" : ` ± ${number(acc[1], aim)}`}<br>${number(spent[0], cost)} ${literal(cost.heading)}, mean of ${acc[2]}<extra>${literal(nameOf(row))}</extra>`,
      });
    }
    const positive = all.filter((value) => value > 0);
    const [least, greatest] = [Math.min(...all), Math.max(...all)], margin = 0.12 * (greatest - least || greatest || 1);
    const log = positive.length === all.length && Math.max(...positive) > 20 * Math.min(...positive);
    return { traces, layout: { xaxis: { title: cost.heading + (log ? " (logarithmic)" : ""), type: log ? "log" : "linear", range: log ? [Math.log10(least) - 0.2, Math.log10(greatest) + 0.2] : [least - margin, greatest + margin] }, yaxis: { title: aim.heading } } };
  }

  function differences(key) {
    const one = figure(key), rows = shownRows().filter((row) => row.differences[key]).reverse();
    const traces = rows.map((row) => {
      const [mean, low, high, count] = row.differences[key], { colour, symbol } = style(row.label);
      const interval = low === null ? "" : ` [${number(low, one, true)}, ${number(high, one, true)}]`;
      return {
        type: "scatter", mode: "markers", x: [mean / one.divisor], y: [literal(nameOf(row))], marker: { color: colour, size: 11, symbol },
        error_x: low === null ? undefined : { type: "data", array: [(high - mean) / one.divisor], arrayminus: [(mean - low) / one.divisor], symmetric: false, color: colour, thickness: 2, width: 6 },
        hovertemplate: `${number(mean, one, true)}${interval}, ${count} ${count === 1 ? "seed" : "seeds"}<extra>${literal(nameOf(row))}</extra>`,
      };
    });
    const zero = { type: "line", x0: 0, x1: 0, y0: 0, y1: 1, yref: "paper", line: { color: css("--faint"), width: 1.5, dash: "dot" } };
    return { traces, layout: { xaxis: { title: `difference in ${one.heading}` }, yaxis: { type: "category", dtick: 1 }, shapes: [zero] }, rows: rows.length };
  }

  function space(layer) {
    const traces = [];
    for (const row of shownRows()) {
      Object.entries(row.space).forEach(([name, found], k) => {
        if (layer !== "" && name !== layer) return;
        traces.push(line(row, found.task, found.used, {
          line: { color: style(row.label).colour, width: 2, dash: layer === "" ? DASHES[k % 4] : style(row.label).dash },
          customdata: found.used.map((used) => (used === null ? "" : rounded(used, 2))),
          hovertemplate: `${literal(name)} after task %{x}: %{customdata} %<extra>${literal(nameOf(row))}</extra>`,
        }));
      });
    }
    return { traces, layout: { xaxis: taskAxis("after task"), yaxis: { title: "used input space (%)", rangemode: "tozero" } } };
  }

  function clients() {
    const traces = shownRows().filter((row) => row.clients.length).map((row) => ({
      type: "box", y: row.clients, name: literal(nameOf(row)), boxpoints: row.clients.length <= 200 ? "all" : "outliers", jitter: 0.5, pointpos: 0,
      marker: { color: style(row.label).colour, size: 4, opacity: 0.6 }, line: { width: 1.5 }, hoverinfo: "y+name", yhoverformat: ".6~g",
    }));
    return { traces, layout: { xaxis: {}, yaxis: { title: `a client's ${mainFigure().heading} at the end` } } };
  }

  function matrixRange() {
    if (measure().percent) return [0, 100];
    let [least, most] = [Infinity, -Infinity];
    for (const row of table().rows) for (const line of (row.measures[measure().key] || { matrix: [] }).matrix) for (const value of line) {
      if (value !== null) { least = Math.min(least, value); most = Math.max(most, value); }
    }
    return [least, most];
  }
  // Light is good, whichever way the measure counts.
  const matrixScale = () => (measure().better === "higher" ? CIVIDIS : CIVIDIS.map(([at], k) => [at, CIVIDIS[CIVIDIS.length - 1 - k][1]]));
  function matrixLegend() {
    const [least, most] = matrixRange(), shown = (value) => rounded(value, measure().percent ? 0 : 2);
    const bar = make("span", { class: "ramp", "aria-hidden": "true" });
    bar.style.background = `linear-gradient(to right, ${matrixScale().map(([at, colour]) => `${colour} ${100 * at}%`).join(", ")})`;
    return make("label", {}, `${shown(least)} `, bar, ` ${shown(most)} ${measure().unit}`);
  }
  function matrixOf(row) {
    return () => {
      const found = row.measures[measure().key], percent = measure().percent;
      const texts = (digits) => found.matrix.map((line) => line.map((value) => (value === null ? "" : rounded(value, digits))));
      const ticks = found.places.map(String), few = ticks.length <= 12;
      const range = matrixRange();
      // Above the diagonal: tasks that were not learned yet.
      const n = ticks.length;
      let path = "";
      for (let t = 0; t < n - 1; t++) path += `M ${t + 0.5} ${t - 0.5} L ${n - 0.5} ${t - 0.5} L ${n - 0.5} ${t + 0.5} L ${t + 0.5} ${t + 0.5} Z `;
      return {
        traces: [{
          type: "heatmap", z: found.matrix, zmin: range[0], zmax: range[1], colorscale: matrixScale(),
          showscale: false, xgap: n <= 25 ? 1 : 0, ygap: n <= 25 ? 1 : 0, text: few ? texts(percent ? 1 : 3) : null, customdata: texts(percent ? 2 : 4).map((line, t) => line.map((text, i) => [found.places[t], found.places[i], text])),
          texttemplate: few ? "%{text}" : "", textfont: { size: n <= 6 ? 12 : 9.5 }, hoverongaps: false,
          hovertemplate: `after task %{customdata[0]}, on task %{customdata[1]}: %{customdata[2]} ${measure().unit}<extra>${literal(nameOf(row))}</extra>`,
        }],
        layout: {
          title: { text: literal(nameOf(row)), font: { size: 13, color: style(row.label).colour }, x: 0.02, xanchor: "left", y: 0.985, yanchor: "top" },
          margin: { l: 42, r: 8, t: 30, b: 38 },
          shapes: path ? [{ type: "path", path, fillcolor: transparent(css("--card"), 0.42), line: { width: 0 } }] : [],
          xaxis: { title: "accuracy on task".replace("accuracy", measure().name), tickvals: labelsAt(n), ticktext: labelsAt(n).map((k) => ticks[k]), showgrid: false, zeroline: false },
          yaxis: { title: "after task", autorange: "reversed", tickvals: labelsAt(n), ticktext: labelsAt(n).map((k) => ticks[k]), showgrid: false, zeroline: false },
        },
      };
    };
  }
  const labelsAt = (count) => [...Array(count).keys()].filter((k) => k % Math.ceil(count / 14) === 0);

  function partition(place) {
    const found = table().partition, counts = found.counts[place];
    const z = counts.map((of) => of.map((value) => (value > 0 ? value : null)));
    const most = Math.max(1, ...found.counts.flat(2));
    const absent = counts[0].map((_, client) => counts.every((of) => of[client] < 0));
    const light = matchMedia("(prefers-color-scheme: dark)").matches ? ["#1f3a52", "#4fb0ea", "#e8f6ff"] : ["#d6e8f5", "#2b83ba", "#08263f"];
    return {
      traces: [{
        type: "heatmap", z, zmin: 0, zmax: most, colorscale: light.map((colour, k) => [k / 2, colour]), hoverongaps: false, xgap: counts[0].length <= 60 ? 1 : 0, ygap: counts.length <= 30 ? 1 : 0,
        colorbar: { title: { text: "samples", side: "right" }, thickness: 12, outlinewidth: 0, len: 0.9 },
        hovertemplate: "client %{x}, class %{y}: %{z} samples<extra></extra>",
      }],
      layout: {
        xaxis: { title: "client", showgrid: false, zeroline: false, range: [-0.5, counts[0].length - 0.5] },
        yaxis: { title: "class", showgrid: false, zeroline: false, range: [counts.length - 0.5, -0.5], tickformat: "d" },
        shapes: absent.flatMap((is, client) => (is ? [{ type: "rect", x0: client - 0.5, x1: client + 0.5, y0: 0, y1: 1, yref: "paper", fillcolor: transparent(css("--faint"), 0.25), line: { width: 0 } }] : [])),
      },
    };
  }

  // Tables. A cell is {text, sort, ...}: numbers sort as numbers, what is undefined comes last.

  function sortable(headings, rows) {
    const body = make("tbody");
    const fill = (ordered) => body.replaceChildren(...ordered.map((row) => row.node));
    const head = make("tr", {}, ...headings.map((heading, column) => {
      const th = make("th", { scope: "col", class: heading.text ? "text" : null, title: heading.meaning || null });
      th.append(make("button", { type: "button", onclick: () => {
        const up = th.getAttribute("aria-sort") !== "ascending";
        head.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
        th.setAttribute("aria-sort", up ? "ascending" : "descending");
        const value = (row) => row.keys[column];
        fill(rows.slice().sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          if (x === null || y === null) return (x === null) - (y === null);
          const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
          return up ? order : -order;
        }));
      } }, heading.name));
      return th;
    }));
    fill(rows);
    return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body));
  }
  function rowName(label) { return make("span", { class: "name" }, swatch(label), data.labels[label]); }

  function meansTable(view) {
    const used = data.figures.filter((one) => table().rows.some((row) => row.figures[one.key]));
    const rows = shownRows();
    const baseline = table().rows.find((row) => row.label === table().baseline);
    const cell = (row, one) => {
      if (view === "difference") {
        const found = row.differences[one.key];
        const common = row.seeds.filter((seed) => baseline.seeds.includes(seed)).length;
        return found ? [found[0], number(found[0], one, true), (found[1] === null ? "" : ` [${number(found[1], one, true)}, ${number(found[2], one, true)}]`) + ofSeeds(found[3], common)] : [null, "–", ""];
      }
      const found = row.figures[one.key];
      if (!found) return [null, "–", ""];
      if (view === "rank") return found[3] === null ? [null, "–", ""] : [found[3], rounded(found[3], 2).replace(/\.?0+$/, ""), ""];
      return [found[0], number(found[0], one), (found[1] === null ? "" : ` ± ${number(found[1], one, false)}`) + ofSeeds(found[2], row.seeds.length)];
    };
    // As shown: means that read the same are best together, and none is where all do.
    const best = new Map(used.map((one) => {
      const values = rows.map((row) => (row.figures[one.key] ? row.figures[one.key][0] : null)).filter((value) => value !== null);
      if (one.better === null || new Set(values.map((value) => number(value, one))).size < 2) return [one.key, null];
      return [one.key, number(one.better === "higher" ? Math.max(...values) : Math.min(...values), one)];
    }));
    return sortable(
      [{ name: "method", text: true }, { name: "seeds" }, ...used.map((one) => ({ name: one.heading, meaning: one.meaning }))],
      rows.map((row) => {
        const cells = used.map((one) => [one, ...cell(row, one)]);
        return {
          keys: [nameOf(row), row.seeds.length, ...cells.map(([, key]) => key)],
          node: make("tr", {}, make("td", {}, rowName(row.label)), make("td", { title: `seed ${row.seeds.join(", ")}` }, String(row.seeds.length)),
            ...cells.map(([one, key, text, rest]) => make("td", { class: view === "mean" && key !== null && text === best.get(one.key) ? "best" : null }, text, rest ? make("span", { class: "deviation" }, rest) : null))),
        };
      }));
  }

  function settingsTable(own) {
    const found = table().settings, rows = table().rows.map((row, k) => [row, found.values[k]]).filter(([row]) => !state.hidden.has(row.label));
    const keys = found.keys.map((key, k) => [key, k]).filter(([, k]) => own || found.differ[k]);
    if (!keys.length) return make("p", { class: "why" }, "The rows do not differ in any setting that both have.");
    return sortable([{ name: "setting", text: true }, ...rows.map(([row]) => ({ name: nameOf(row), text: true }))],
      keys.map(([key, k]) => ({
        keys: [key, ...rows.map(([, values]) => values[k] || null)],
        node: make("tr", {}, make("td", {}, make("code", {}, key)), ...rows.map(([, values]) => make("td", { class: "text wrap" }, values[k] || "–"))),
      })));
  }

  function runsTable() {
    const used = data.figures.filter((one) => table().rows.some((row) => row.figures[one.key]));
    const runs = table().runs.filter((run) => !state.hidden.has(table().rows[run.row].label));
    return sortable([{ name: "method", text: true }, { name: "seed" }, { name: "rounds" }, ...used.map((one) => ({ name: one.heading, meaning: one.meaning })), { name: "configuration", text: true }, { name: "folder", text: true }],
      runs.map((run) => {
        const label = table().rows[run.row].label;
        return {
          keys: [data.labels[label], run.seed, run.rounds, ...used.map((one) => run.figures[one.key] ?? null), run.hash, run.folder],
          node: make("tr", {}, make("td", {}, rowName(label)), make("td", {}, String(run.seed)), make("td", {}, run.rounds.toLocaleString("en-US")),
            ...used.map((one) => make("td", {}, number(run.figures[one.key], one))), make("td", { class: "text" }, make("code", {}, run.hash)), make("td", { class: "text" }, make("code", {}, run.folder))),
        };
      }));
  }

  // The page.

  function select(values, onchange, chosen) {
    const node = make("select", { onchange: () => onchange(node.value) }, ...values.map(([value, text]) => make("option", { value }, text)));
    if (chosen !== undefined) node.value = chosen;
    return node;
  }
  function section(id, title, why, ...content) {
    const control = content[0] && content[0].tagName === "LABEL" ? content.shift() : null;
    return make("section", { id, "aria-labelledby": `${id}-title` }, make("div", { class: "head" }, make("h2", { id: `${id}-title` }, title), control), why ? make("p", { class: "why" }, why) : null, ...content);
  }
  const wide = (node) => { node.classList.add("wide"); return node; };
  const labelled = (text, control) => make("label", {}, `${text} `, control);

  let redraw = [];
  function live(content) {
    const place = make("div");
    const fill = () => place.replaceChildren(content());
    redraw.push(fill);
    fill();
    return place;
  }

  function build() {
    for (const { node } of charts) { observer.unobserve(node); Plotly.purge(node); }
    charts = [];
    redraw = [];
    const measured = data.measures.map((one) => table().rows.some((row) => row.measures[one.key]));
    if (!measured[state.measure]) state.measure = Math.max(0, measured.indexOf(true));
    chooseMeasure.value = state.measure;
    [...chooseMeasure.options].forEach((option, k) => { option.disabled = !measured[k]; });
    const here = table(), main = document.getElementById("main"), sections = [];
    const has = (key) => here.rows.some((row) => row.figures[key]);
    let view = "mean";
    const views = [["mean", "mean ± std"]];
    if (here.rows.some((row) => Object.values(row.figures).some((found) => found[3] !== null))) views.push(["rank", "mean rank"]);
    if (here.baseline !== null) views.push(["difference", `difference to ${data.labels[here.baseline]}`]);
    const means = live(() => meansTable(view));
    const chooseView = select(views, (value) => { view = value; redraw.forEach((fill) => fill()); });
    sections.push(wide(section("means", here.title, "Mean over seeds ± sample standard deviation; best mean in bold. Differences are paired on common seeds, with the "
      + `${Math.round(data.level * 100)} % confidence interval of their mean; ranks are averaged over the seeds that all rows have.`, labelled("cells", chooseView), means)));
    if (here.notes.length) sections.splice(0, 0, wide(make("ul", { class: "notes" }, ...here.notes.map((note) => make("li", {}, note)))));

    if (here.rows.some((row) => row.measures[measure().key])) {
      sections.push(section("seen", `${measure().key === "accuracy" ? "ACC" : measure().name} over the tasks`, "Mean over the tasks seen so far; the band is ± one standard deviation over seeds.", plot(() => overTasks("seen"))));
      sections.push(section("first", "Forgetting of the first task", "What is left of task 0 after each task.", plot(() => overTasks("first"))));
    }
    if (here.rows.some((row) => row.rounds)) {
      let axis = "round";
      const chart = plot(() => learningCurves(axis));
      const axes = [["round", "rounds"], ["uplink_bytes", "uplink"], ["seconds", "time"]].filter(([key]) => here.rows.some((row) => row.rounds && row.rounds[key] && row.rounds[curveOf().key]));
      sections.push(section("rounds", "Learning curves", "Where the model was evaluated between task ends.", labelled("over", select(axes, (value) => { axis = value; refresh(); })), chart));
    }
    const aimed = mainFigure();
    if (aimed && has("uplink_bytes")) sections.push(section("uplink", `${mainName()} against uplink`, "Bytes sent by all clients over all rounds; small marks are single seeds.", plot(() => againstCost("uplink_bytes"))));
    if (aimed && has("epsilon_all_tasks")) sections.push(section("epsilon", `${mainName()} against epsilon`, "What all noisy sums tell about one client, over all tasks; what it does not cover is in each run's summary.", plot(() => againstCost("epsilon_all_tasks"))));
    if (aimed && has("seconds")) sections.push(section("time", `${mainName()} against time`, "Seconds of the whole run, on whatever machine it ran.", plot(() => againstCost("seconds"))));
    const compared = data.figures.filter((one) => here.rows.some((row) => row.differences[one.key]));
    if (compared.length) {
      let key = compared[0].key;
      const chart = plot(() => differences(key));
      sections.push(section("differences", `Difference to ${data.labels[here.baseline]}`, "Paired on common seeds, with the confidence interval of the mean where there are several.",
        labelled("figure", select(compared.map((one) => [one.key, one.heading]), (value) => { key = value; refresh(); })), chart));
    }
    const layers = [...new Set(here.rows.flatMap((row) => Object.keys(row.space)))];
    if (layers.length) {
      let layer = "";
      const chart = plot(() => space(layer));
      sections.push(section("space", "Used subspace per layer", "Share of each layer's input space that is protected after a task.",
        labelled("layer", select([["", "all (line styles)"], ...layers.map((name) => [name, name])], (value) => { layer = value; refresh(); })), chart));
    }
    if (aimed && here.rows.some((row) => row.clients.length)) sections.push(section("clients", "Spread over clients", `Each client's own ${mainName()} at the end, all seeds together.`, plot(clients)));

    const panelled = here.rows.filter((row) => row.measures[measure().key]);
    if (panelled.length) {
      const panels = panelled.map((row) => ({ row, node: plot(matrixOf(row)) }));
      const toggle = () => panels.forEach(({ row, node }) => { node.hidden = state.hidden.has(row.label); });
      redraw.push(toggle);
      toggle();
      sections.push(wide(section("matrices", `${measure().name[0].toUpperCase()}${measure().name.slice(1)} after each task on each task`, "Mean over seeds. Paler cells: tasks not learned yet. All panels share one scale.", matrixLegend(), make("div", { class: "grid" }, ...panels.map(({ node }) => node)))));
    }
    if (here.partition) {
      const found = here.partition;
      let place = 0;
      const chart = plot(() => partition(place));
      const cut = [found.tasks.length < found.total_tasks ? `${found.tasks.length} of ${found.total_tasks} tasks` : "", found.counts[0][0].length < found.total_clients ? `first ${found.counts[0][0].length} of ${found.total_clients} clients` : ""].filter(Boolean);
      sections.push(wide(section("partition", "Partition", `Samples per client and class, seed ${found.seed} of ${found.row}${cut.length ? ` (${cut.join(", ")})` : ""}. Grey: takes no part.`,
        labelled("task", select(found.tasks.map((task, k) => [k, task]), (value) => { place = Number(value); refresh(); })), chart)));
    }
    if (here.samples.shown.length) {
      const pictures = here.samples.shown.map((one) => {
        const row = here.rows[one.row], name = `${nameOf(row)}, seed ${one.seed}`;
        return { row, node: make("figure", { class: "samples" }, make("figcaption", {}, rowName(row.label), ` seed ${one.seed}`), make("img", { src: `data:image/png;base64,${one.png}`, alt: `samples: ${name}` })) };
      });
      const toggle = () => pictures.forEach(({ row, node }) => { node.hidden = state.hidden.has(row.label); });
      redraw.push(toggle);
      toggle();
      const missing = here.samples.left_out;
      sections.push(wide(section("samples", "Samples", `At the end of a run, of each row's first run: drawn from its density, or test images with the boxes that its detector finds.${missing ? ` The page has no room for ${missing} more.` : ""}`, make("div", { class: "grid" }, ...pictures.map(({ node }) => node)))));
    }
    let own = false;
    const settings = live(() => settingsTable(own));
    const box = make("input", { type: "checkbox", onchange: () => { own = box.checked; redraw.forEach((fill) => fill()); } });
    sections.push(wide(section("settings", "Configuration differences", null, make("label", {}, box, " also settings that only some rows have"), settings)));
    sections.push(wide(section("runs", "Runs", null, live(runsTable))));
    if (data.left_out.length || data.warnings.length) {
      const items = [...data.left_out.map((one) => make("li", {}, make("code", {}, one.folder), `: ${one.reason}`)), ...data.warnings.map((text) => make("li", {}, text))];
      sections.push(wide(section("left-out", "Not compared", null, make("ul", { class: "notes" }, ...items))));
    }
    main.replaceChildren(...sections);
    const runs = data.tables.reduce((sum, one) => sum + one.runs.length, 0);
    document.getElementById("counts").textContent = `${runs} ${runs === 1 ? "run" : "runs"}${data.left_out.length ? `, ${data.left_out.length} not compared` : ""}`;
    chips();
  }

  function chips() {
    document.getElementById("methods").replaceChildren(...table().rows.map((row) => {
      const button = make("button", { type: "button", "aria-pressed": String(!state.hidden.has(row.label)), title: "click: show or hide; double click: only this one" }, swatch(row.label), nameOf(row));
      button.addEventListener("click", () => { if (!state.hidden.delete(row.label)) state.hidden.add(row.label); update(); });
      button.addEventListener("dblclick", () => { state.hidden = new Set(data.labels.keys()); state.hidden.delete(row.label); update(); });
      return button;
    }));
  }
  function update() {
    const buttons = document.querySelectorAll("#methods button");
    table().rows.forEach((row, k) => buttons[k].setAttribute("aria-pressed", String(!state.hidden.has(row.label))));
    redraw.forEach((fill) => fill());
    refresh();
  }

  const chooseTable = document.getElementById("table"), chooseMeasure = document.getElementById("measure");
  chooseTable.append(...data.tables.map((one, k) => make("option", { value: k }, one.title)));
  chooseTable.addEventListener("change", () => { state.table = Number(chooseTable.value); build(); });
  chooseMeasure.append(...data.measures.map((one, k) => make("option", { value: k }, one.name)));
  chooseMeasure.addEventListener("change", () => { state.measure = Number(chooseMeasure.value); build(); });
  document.getElementById("table-choice").hidden = data.tables.length < 2;
  document.getElementById("measure-choice").hidden = data.measures.length < 2;
  document.getElementById("all").addEventListener("click", () => { state.hidden.clear(); update(); });
  document.getElementById("none").addEventListener("click", () => { state.hidden = new Set(data.labels.keys()); update(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  build();
})();
