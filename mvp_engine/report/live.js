// The live page: asks the server for its parts every 2 s, or less often if they take long, and adds zoom and values under the pointer to its plots.
"use strict";
const byId = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const tip = byId("tip");
const texts = {};
let start = null; // where a zoom began: the plot and its step

async function update() {
  try {
    const answer = await fetch("/parts?" + query);
    const parts = await answer.json();
    byId("lost").hidden = true;
    for (const [name, html] of Object.entries(parts)) {
      if (texts[name] === html || (name === "plots" && start)) continue;
      const log = document.querySelector("#log pre");
      const atEnd = !log || log.scrollTop + log.clientHeight > log.scrollHeight - 40;
      byId(name).innerHTML = html; // the server escapes what is from data, and its policy forbids scripts in it
      texts[name] = html;
      if (name === "plots") tip.hidden = true;
      if (name === "log" && atEnd) document.querySelectorAll("#log pre").forEach((one) => (one.scrollTop = 1e9));
      if (name === "list") filter();
    }
  } catch {
    byId("lost").hidden = false;
  }
}

function change(set) {
  set();
  history.replaceState(null, "", "?" + query);
  byId("reset").hidden = !query.has("window");
  update();
}

function filter() {
  const word = byId("filter").value.toLowerCase();
  for (const run of document.querySelectorAll(".run")) {
    run.hidden = !run.textContent.toLowerCase().includes(word) && !run.querySelector("input").checked;
    run.style.display = run.hidden ? "none" : "";
  }
}

byId("filter").addEventListener("input", filter);
byId("side").checked = query.get("side") === "1";
byId("side").addEventListener("change", (event) =>
  change(() => (event.target.checked ? query.set("side", "1") : query.delete("side"))),
);
byId("reset").addEventListener("click", () => change(() => query.delete("window")));
byId("list").addEventListener("change", () =>
  change(() => {
    query.delete("run");
    for (const box of document.querySelectorAll(".run input:checked")) query.append("run", box.value);
  }),
);
byId("answers").addEventListener("change", (event) => {
  if (event.target.dataset.key === "step") change(() => query.set("step", event.target.value));
});

// ---- Plots: the step and the values under the pointer, and a zoom by dragging ----

function place(svg, event) {
  if (!svg.plot) svg.plot = JSON.parse(svg.dataset.plot);
  const { x, axes } = svg.plot;
  const box = svg.getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
  const inside = Math.min(axes[1], Math.max(axes[0], at));
  return { at: inside, step: x[0] + ((inside - axes[0]) / (axes[1] - axes[0])) * (x[1] - x[0]) };
}

function mark(svg, name, attributes) {
  let shape = svg.querySelector("." + name);
  if (!shape) {
    shape = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name === "at" ? "line" : "rect"));
    shape.setAttribute("class", name);
  }
  for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
}

function nearest(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle;
    else high = middle;
  }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
}

function clear() {
  tip.hidden = true;
  document.querySelectorAll(".plot .at").forEach((one) => one.remove());
}

const plots = byId("plots");
plots.addEventListener("pointermove", (event) => {
  const svg = event.target.closest("svg");
  if (!svg) return clear();
  const { at, step } = place(svg, event);
  const { x, axes, curves } = svg.plot;
  if (start && start.svg === svg) {
    mark(svg, "zoomed", { x: Math.min(at, start.at), width: Math.abs(at - start.at), y: axes[2], height: axes[3] - axes[2] });
  }
  tip.replaceChildren();
  let shown = null;
  for (const [name, colour, steps, values] of curves) {
    if (!steps.length) continue;
    const index = nearest(steps, step);
    const line = document.createElement("div");
    const dot = document.createElement("i");
    dot.style.background = colour;
    line.append(dot, `${name} ${values[index]}` + (curves.length > 1 ? `, step ${steps[index]}` : ""));
    tip.append(line);
    if (shown === null || Math.abs(steps[index] - step) < Math.abs(shown - step)) shown = steps[index];
  }
  if (shown === null) return clear();
  const line = axes[0] + ((shown - x[0]) / (x[1] - x[0])) * (axes[1] - axes[0]);
  for (const other of document.querySelectorAll(".plot .at")) if (other.parentNode !== svg) other.remove();
  mark(svg, "at", { x1: line, x2: line, y1: axes[2], y2: axes[3] });
  const head = document.createElement("b");
  head.textContent = `step ${shown.toLocaleString("en")}`;
  tip.prepend(head);
  tip.hidden = false;
  const width = tip.offsetWidth;
  tip.style.left = Math.max(4, event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16) + "px";
  tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4) + "px";
});
plots.addEventListener("pointerleave", clear);
plots.addEventListener("pointerdown", (event) => {
  const svg = event.target.closest("svg");
  if (svg && event.button === 0) start = { svg, ...place(svg, event) };
});
addEventListener("pointerup", (event) => {
  const from = start;
  start = null;
  if (!from) return;
  from.svg.querySelector(".zoomed")?.remove();
  const end = place(from.svg, event);
  if (Math.abs(end.at - from.at) < 6) return; // a click
  const steps = [from.step, end.step].sort((a, b) => a - b);
  change(() => query.set("window", steps.map((step) => step.toFixed(2)).join(",")));
});
addEventListener("pointercancel", () => (start = null));
plots.addEventListener("dblclick", () => change(() => query.delete("window")));

byId("reset").hidden = !query.has("window");
async function keepUpdating() {
  const began = performance.now();
  if (!document.hidden) await update();
  setTimeout(keepUpdating, Math.max(2000, 10 * (performance.now() - began)));
}
keepUpdating();
document.addEventListener("visibilitychange", () => document.hidden || update());
