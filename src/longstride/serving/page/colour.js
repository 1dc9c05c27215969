// Scales. Bits go from 0 to 8 and beyond, attention weights from 0 to the head's largest. Lightness changes evenly along
// both, so that they are read without telling hues apart. Text is coloured by style.css from the level; canvases by a table.

import { element } from "./dom.js";

export const MOST_BITS = 8;
const STEPS = 24;

export function bitsLevel(bits) {
  return Math.min(1, Math.max(0, bits / MOST_BITS));
}

export function legend(kind, from, to) {
  const ramp = element("span", { class: `ramp ${kind}`, "aria-hidden": "true" });
  for (let step = 0; step < STEPS; step += 1) {
    const part = element("span");
    part.style.setProperty("--level", step / (STEPS - 1));
    ramp.append(part);
  }
  return element("p", { class: "legend" }, element("span", {}, from), ramp, element("span", {}, to));
}

// The legend of canvases.
export function heatLegend(from, to) {
  const canvas = element("canvas", { width: 128, height: 1, class: "ramp", "aria-hidden": "true" });
  const paint = canvas.getContext("2d");
  const image = paint.createImageData(128, 1);
  for (let step = 0; step < 128; step += 1) image.data.set([...heat(step / 127), 255], 4 * step);
  paint.putImageData(image, 0, 0);
  return element("p", { class: "legend" }, element("span", {}, from), canvas, element("span", {}, to));
}

// Black, violet, orange, pale yellow; as oklch of rising lightness.
const TABLE = Array.from({ length: 256 }, (_, index) => {
  const level = index / 255;
  const hue = ((300 + 150 * level) % 360) * (Math.PI / 180);
  const chroma = 0.04 + 0.56 * level * (1 - level);
  return linearToBytes(oklab(0.12 + 0.84 * level, chroma * Math.cos(hue), chroma * Math.sin(hue)));
});

function oklab(lightness, a, b) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

function linearToBytes(channels) {
  return channels.map((value) => {
    const inside = Math.min(1, Math.max(0, value));
    return Math.round(255 * (inside <= 0.0031308 ? 12.92 * inside : 1.055 * inside ** (1 / 2.4) - 0.055));
  });
}

// Red, green and blue of a level from 0 to 1.
export function heat(level) {
  return TABLE[Math.round(255 * Math.min(1, Math.max(0, level)))];
}
