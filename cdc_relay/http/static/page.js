// Refreshes the figures and draws the charts. All text is made by the server and set as text.
"use strict";

const REFRESH_MS = 5000;
// Column of the history and color of each line. The server says what was measured.
const CHARTS = {
  pending: { of: "rows", lines: [["pending", "--one"]] },
  oldest: { of: "seconds", lines: [["oldest", "--one"]] },
  dead: { of: "rows", lines: [["dead", "--two"]] },
  throughput: {
    of: "rows a second",
    // Where they lie on each other, each is seen beside the next, thinner one.
    lines: [["received", "--two", 6], ["sent", "--one", 4], ["marked", "--three", 1.5]],
  },
  latency: { of: "seconds", lines: [["p50", "--one"], ["p99", "--two"]] },
};

const charts = new Map();
let range = "1h";
let timer = 0;
let latest = null;
let listed = "";

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return +(value / 1e6).toFixed(1) + "M";
  if (value >= 1e4) return +(value / 1e3).toFixed(1) + "k";
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : String(+value.toPrecision(2));
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 1) return +(value * 1000).toPrecision(3) + " ms";
  if (value < 120) return +value.toPrecision(3) + " s";
  if (value < 7200) return +(value / 60).toPrecision(3) + " min";
  return value < 172800 ? +(value / 3600).toPrecision(3) + " h" : +(value / 86400).toPrecision(3) + " d";
}

function clock(at, withSeconds) {
  const parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Date(at * 1000).toLocaleTimeString([], withSeconds ? { ...parts, second: "2-digit" } : parts);
}

// What the legend says of a line: the value under the pointer, else the last one.
function pointed(chart, line, index) {
  const values = chart.data[line];
  return values[index ?? values.length - 1];
}

function write(kind) {
  return kind.of === "seconds" ? seconds : short;
}

function make(place, kind) {
  const text = write(kind);
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  const whole = kind.of === "rows";
  const options = {
    width: place.clientWidth,
    height: parseInt(getComputedStyle(place).getPropertyValue("--plot"), 10),
    cursor: { drag: { x: false, y: false } },
    scales: {
      x: { time: true, range: () => [latest.now - latest.span_s, latest.now] },
      // From nothing up, and never flat: a line of noughts lies on the ground.
      y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] },
    },
    axes: [
      { ...axis, space: 70, size: 34, values: (_, ticks) => ticks.map((tick) => clock(tick, false)) },
      {
        ...axis,
        size: 62,
        values: (_, ticks) => ticks.map((tick) => (whole && !Number.isInteger(tick) ? "" : text(tick))),
      },
    ],
    series: [
      {
        label: "at",
        value: (chart, _value, line, index) => {
          const at = pointed(chart, line, index);
          return at === undefined ? "–" : clock(at, true);
        },
      },
      ...kind.lines.map(([column, stroke, width]) => ({
        label: column,
        stroke: color(stroke),
        width: width ?? 2,
        points: { show: false },
        value: (chart, _value, line, index) => text(pointed(chart, line, index)),
      })),
    ],
  };
  place.replaceChildren();
  return new uPlot(options, [[], ...kind.lines.map(() => [])], place);
}

function draw(name) {
  const history = latest.history;
  const place = document.querySelector(`[data-chart="${name}"]`);
  const kind = CHARTS[name];
  if (!charts.has(name)) charts.set(name, make(place, kind));
  charts.get(name).setData([history.time, ...kind.lines.map(([column]) => history[column])]);
  const text = write(kind);
  const said = kind.lines.map(([column]) => {
    const known = history[column].filter((value) => value !== null);
    if (!known.length) return `${column} not known`;
    return `${column} last ${text(known[known.length - 1])}, highest ${text(Math.max(...known))}`;
  });
  place.setAttribute("aria-label", `${place.dataset.label} (${kind.of}), last ${range}: ${said.join("; ")}`);
}

function redraw() {
  charts.forEach((chart) => chart.destroy());
  charts.clear();
  if (latest !== null) Object.keys(CHARTS).forEach(draw);
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function list(id, items) {
  document.getElementById(id).replaceChildren(...items);
}

function table(id, rows) {
  const made = rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => element("td", cell)));
    return row;
  });
  const place = document.getElementById(id);
  place.tBodies[0].replaceChildren(...made);
  place.parentElement.hidden = !rows.length;
  document.getElementById(`${id}-none`).hidden = rows.length > 0;
}

function reason(one) {
  const made = document.createElement("li");
  made.append(element("strong", one.text), ` ${one.advice}`);
  return made;
}

function show() {
  for (const [name, figure] of Object.entries(latest.figures)) {
    for (const place of document.querySelectorAll(`data[data-figure="${name}"]`)) {
      if (place.textContent !== figure.text) place.textContent = figure.text;
      place.dataset.level = figure.level;
      if (figure.value === null) place.removeAttribute("value");
      else place.value = String(figure.value);
    }
  }
  // Only what changed is set anew: a screen reader would read it all again, and lose its place.
  const lists = JSON.stringify([latest.reasons, latest.advice, latest.members, latest.troubled]);
  if (lists !== listed) {
    listed = lists;
    list("reasons", latest.reasons.map(reason));
    list("advice", latest.advice.map((text) => element("li", text)));
    table("members", latest.members);
    table("troubled", latest.troubled);
  }
  Object.keys(CHARTS).forEach(draw);
}

async function refresh() {
  clearTimeout(timer);
  const asked = range;
  try {
    const answer = await fetch(`/data.json?range=${asked}`, { signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(String(answer.status));
    const data = await answer.json();
    if (asked === range) {
      latest = data;
      show();
    }
    document.getElementById("lost").hidden = true;
    document.body.dataset.refreshed = String(data.now);
  } catch {
    document.getElementById("lost").hidden = false;
  }
  clearTimeout(timer);
  timer = setTimeout(refresh, REFRESH_MS);
}

document.querySelectorAll("[data-chart]").forEach((place) => {
  place.dataset.label = place.getAttribute("aria-label");
});
document.querySelectorAll("[data-range]").forEach((button) => {
  button.addEventListener("click", () => {
    range = button.dataset.range;
    document
      .querySelectorAll("[data-range]")
      .forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    refresh();
  });
});
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redraw, 200);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
refresh();
