// What is known about the model: its card, its config in words, and the curve of its run.

import { count, element, number } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 640;
const TALL = 300;
const EDGE = { left: 46, right: 56, top: 28, bottom: 38 };

export function showAbout(box, about) {
  const { card, run } = about;
  const parts = [element("section", { class: "card" }, element("h2", {}, about.name),
    card?.title ? element("p", { class: "lead" }, card.title) : null, table(about.config))];
  if (run) {
    parts.push(element("section", { class: "card" }, element("h2", {}, "The run"),
      run.training.length ? curve(run) : element("p", { class: "hint" }, run.note || "The run has not logged a step yet."),
      run.summary.length ? table(run.summary) : null));
  }
  if (card) parts.push(...cardSections(card));
  else parts.push(element("section", { class: "card" }, element("h2", {}, "Card"), element("p", { class: "hint" },
    "This model has no card: nothing is known here of its data, licence and limits beyond its run.")));
  box.replaceChildren(...parts);
}

function table(rows) {
  return element("dl", { class: "table" }, rows.flatMap(([name, text]) => [
    element("dt", {}, name[0].toUpperCase() + name.slice(1)), element("dd", {}, text)]));
}

function cardSections(card) {
  const sections = [];
  const figures = [...card.figures, ...(card.check ? [{ ...card.check, data: `${card.check.data}, bundled with longstride` }] : [])];
  if (figures.length) {
    const rows = figures.map((figure) => element("tr", {}, element("td", {}, figure.data),
      element("td", {}, figure.bytes.toLocaleString("en")), element("td", {}, figure.min_context.toLocaleString("en")),
      element("td", {}, number(figure.bits_per_byte, 3))));
    const names = ["data", "bytes", "least context", "bits per byte"];
    sections.push(element("section", { class: "card" }, element("h2", {}, "Bits per byte"), element("div", { class: "scroll", tabindex: 0 },
      element("table", {}, element("thead", {}, element("tr", {}, names.map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, rows)))));
  }
  const licence = [card.licence && `${card.licence}.`, card.terms].filter(Boolean).join(" ");
  const training = card.command ? [element("p", {}, count(card.steps, "step")), element("pre", { tabindex: 0 }, card.command)] : null;
  const texts = [["Data", card.data], ["Licence", licence], ["Limits", card.limits], ["Samples", card.samples], ["Training", training]];
  for (const [title, text] of texts) {
    if (!text || !text.length) continue;
    sections.push(element("section", { class: "card" }, element("h2", {}, title), Array.isArray(text) ? text : element("p", {}, text)));
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
  const values = [...run.training, ...run.validation].map(([, bits]) => bits);
  const sorted = [...values].sort((a, b) => a - b);
  const typical = sorted[Math.floor(0.97 * (sorted.length - 1))];
  const most = Math.max(typical, ...run.validation.map(([, bits]) => bits)) + 0.05;
  const least = sorted[0] - 0.05;
  const last = Math.max(1, ...run.training.map(([step]) => step), ...run.validation.map(([step]) => step));
  const x = (step) => EDGE.left + (step / last) * (WIDE - EDGE.left - EDGE.right);
  const y = (bits) => EDGE.top + ((most - bits) / (most - least || 1)) * (TALL - EDGE.top - EDGE.bottom);
  const best = run.validation.reduce((a, b) => (b[1] < a[1] ? b : a), run.validation[0]);
  const label = best ? `Best validation ${number(best[1], 3)} bits per byte at step ${best[0]}.` : "Training bits per byte.";
  const picture = shape("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": label, class: "curve" });
  for (const bits of ticks(least, most)) {
    picture.append(shape("line", { x1: EDGE.left, x2: WIDE - EDGE.right, y1: y(bits), y2: y(bits), class: "grid" }),
      shape("text", { x: EDGE.left - 8, y: y(bits) + 4, "text-anchor": "end" }, Number(bits.toFixed(6))));
  }
  for (const step of ticks(0, last)) {
    picture.append(shape("text", { x: x(step), y: TALL - EDGE.bottom + 18, "text-anchor": "middle" }, step.toLocaleString("en")));
  }
  const line = (points, name) => shape("polyline", { class: name, points: points.filter(([, bits]) => bits <= most).map(([step, bits]) => `${x(step).toFixed(1)},${y(bits).toFixed(1)}`).join(" ") });
  picture.append(shape("text", { x: 4, y: 12 }, "bits per byte"),
    shape("text", { x: (EDGE.left + WIDE - EDGE.right) / 2, y: TALL - 4, "text-anchor": "middle" }, "step"),
    line(run.training, "training"), line(run.validation, "validation"));
  for (const [step, bits] of run.validation) picture.append(shape("circle", { cx: x(step), cy: y(bits), r: 3, class: "validation" }));
  if (run.validation.length) {
    const [step, bits] = run.validation.at(-1);
    picture.append(shape("text", { x: x(step) + 8, y: y(bits) + 4, class: "value" }, number(bits, 3)));
  }
  const key = element("p", { class: "legend" }, element("span", { class: "swatch training" }), element("span", {}, "training"),
    element("span", { class: "swatch validation" }), element("span", {}, "validation"));
  return element("figure", {}, key, picture);
}
