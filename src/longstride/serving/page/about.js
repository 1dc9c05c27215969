// What is known about the model: its card, its config in words, and the curve of its run.

import { breakable, count, element, number } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const TALL = 300;
const SIZES = { wide: 640, narrow: 360 };
const NARROW = window.matchMedia("(max-width: 30rem)");
const EDGE = { left: 46, right: 56, top: 28, bottom: 38 };

export function showAbout(box, about) {
  draw(box, about);
  NARROW.addEventListener("change", () => draw(box, about));
}

function draw(box, about) {
  const { card, run } = about;
  const parts = [element("section", { class: "card" }, element("h2", {}, about.name),
    card?.title ? element("p", { class: "lead" }, card.title) : null, table(about.config))];
  if (card) parts.push(...cardSections(card));
  else parts.push(section("Card", element("p", { class: "hint" },
    "This model has no card, which would tell of its data, its licence and its limits: longstride export writes one.")));
  if (run) {
    parts.push(section("The run",
      run.training.length ? curve(run) : element("p", { class: "hint" }, run.note || "The run has not logged a step yet."),
      run.summary.length ? table(run.summary) : null));
  }
  box.replaceChildren(...parts);
}

function section(title, ...content) {
  return element("section", { class: "card" }, element("h2", {}, title), content);
}

function table(rows) {
  return element("dl", { class: "table" }, rows.flatMap(([name, text]) => [
    element("dt", {}, name[0].toUpperCase() + name.slice(1)), element("dd", {}, breakable(text))]));
}

function cardSections(card) {
  const sections = [];
  const figures = [...card.figures];
  if (card.check) figures.push({ ...card.check, data: `${card.check.data}, bundled with longstride` });
  if (figures.length) {
    const names = ["data", "bytes", "least context", "bits per byte"];
    const rows = figures.map((figure) => [figure.data, figure.bytes.toLocaleString("en"),
      figure.min_context.toLocaleString("en"), number(figure.bits_per_byte, 3)]);
    // Roles are given, as a narrow window lays the table out as a grid.
    const line = (cells) => element("tr", { role: "row" }, cells);
    const head = line(names.map((name) => element("th", { scope: "col", role: "columnheader" }, name)));
    const body = rows.map((row) => line(row.map((text) => element("td", { role: "cell" }, breakable(text)))));
    sections.push(section("Bits per byte", element("div", { class: "scroll", tabindex: 0 },
      element("table", { role: "table" }, element("thead", { role: "rowgroup" }, head),
        element("tbody", { role: "rowgroup" }, body)))));
  }
  const licence = [card.licence && `${card.licence}.`, card.terms].filter(Boolean).join(" ");
  const texts = { Data: card.data, Licence: licence, Limits: card.limits, Samples: card.samples };
  for (const [title, text] of Object.entries(texts)) {
    if (text) sections.push(section(title, element("p", {}, breakable(text))));
  }
  if (card.command) {
    const taken = card.planned_steps > card.steps ? `${card.steps.toLocaleString("en")} of ` : "";
    const steps = card.steps ? element("p", {}, taken + count(Math.max(card.steps, card.planned_steps), "step")) : null;
    sections.push(section("Training", steps, element("pre", { tabindex: 0 }, card.command)));
  }
  return sections;
}

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round numbers from `least` to `most`, about five.
export function ticks(least, most) {
  const span = most - least || 1;
  const power = 10 ** Math.floor(Math.log10(span / 4));
  const step = power * [1, 2, 5, 10].find((factor) => span / (power * factor) <= 6);
  const first = Math.ceil(least / step - 1e-9);
  return Array.from({ length: Math.floor(most / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
}

// Bits per byte against steps. The first points may lie far above the rest, so the axis ends where most of them do.
function curve(run) {
  const wide = NARROW.matches ? SIZES.narrow : SIZES.wide;
  const values = [...run.training, ...run.validation].map(([, bits]) => bits);
  const sorted = [...values].sort((a, b) => a - b);
  const typical = sorted[Math.floor(0.97 * (sorted.length - 1))];
  const most = Math.max(typical, ...run.validation.map(([, bits]) => bits)) + 0.05;
  const least = sorted[0] - 0.05;
  const last = Math.max(1, ...run.training.map(([step]) => step), ...run.validation.map(([step]) => step));
  const x = (step) => EDGE.left + (step / last) * (wide - EDGE.left - EDGE.right);
  const y = (bits) => EDGE.top + ((most - bits) / (most - least)) * (TALL - EDGE.top - EDGE.bottom);
  const best = run.validation.reduce((a, b) => (b[1] < a[1] ? b : a), run.validation[0]);
  const label = best ? `Best validation ${number(best[1], 3)} bits per byte at step ${best[0]}.` : "Training bits per byte.";
  const picture = shape("svg", { viewBox: `0 0 ${wide} ${TALL}`, role: "img", "aria-label": label, class: "curve" });
  const write = (text, place, more = {}) => picture.append(shape("text", { x: place[0], y: place[1], ...more }, text));
  for (const bits of ticks(least, most)) {
    picture.append(shape("line", { x1: EDGE.left, x2: wide - EDGE.right, y1: y(bits), y2: y(bits), class: "grid" }));
    write(Number(bits.toFixed(6)), [EDGE.left - 8, y(bits) + 4], { "text-anchor": "end" });
  }
  const middle = { "text-anchor": "middle" };
  for (const step of ticks(0, last).filter((_, index, every) => wide > 400 || index % 2 === 0 || every.length < 5)) {
    write(step.toLocaleString("en"), [x(step), TALL - EDGE.bottom + 18], middle);
  }
  write("step", [(EDGE.left + wide - EDGE.right) / 2, TALL - 4], middle);
  write("bits per byte", [4, 12]);
  for (const name of ["training", "validation"]) {
    const points = run[name].filter(([, bits]) => bits <= most);
    const places = points.map(([step, bits]) => `${x(step).toFixed(1)},${y(bits).toFixed(1)}`);
    picture.append(shape("polyline", { class: name, points: places.join(" ") }));
  }
  for (const [step, bits] of run.validation) {
    picture.append(shape("circle", { cx: x(step), cy: y(bits), r: 3, class: "validation" }));
  }
  if (run.validation.length) {
    const [step, bits] = run.validation.at(-1);
    write(number(bits, 3), [x(step) + 8, y(bits) + 4], { class: "value" });
  }
  const key = ["training", "validation"].flatMap((name) => [
    element("span", { class: `swatch ${name}` }), element("span", {}, name)]);
  return element("figure", {}, element("p", { class: "legend" }, key), picture);
}
