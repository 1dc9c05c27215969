// Images: pick or upload one, complete its lower part several times, look at a pixel.

import { complete, postJson } from "./api.js";
import { joined } from "./bytes.js";
import { bitsLevel, heat, heatLegend } from "./colour.js";
import { Controls } from "./controls.js";
import { button, Choice, element, labelled, mean, number } from "./dom.js";
import { LookPanel } from "./look.js";
import { Format } from "./pixels.js";

const CHANNELS = { 1: ["grey"], 3: ["red", "green", "blue"], 4: ["red", "green", "blue", "alpha"] };
const DIM = 0.3; // brightness of the picture under attention weights

export class ImageView {
  constructor(stage, look, about, samples, showError) {
    Object.assign(this, { about, showError, samples });
    this.format = new Format(about.item);
    this.channelNames = CHANNELS[about.item[2]] ?? Array.from({ length: about.item[2] }, (_, index) => `channel ${index}`);
    this.shadeBy = "picture";
    this.weights = null;
    this.images = [];
    this.gallery = element("div", { class: "gallery", role: "radiogroup", "aria-label": "Bundled images" });
    const { height } = this.format;
    this.keep = element("input",
      { type: "range", min: 1, max: Math.max(1, height - 1), value: Math.max(1, height >> 1) });
    this.kept = element("output", {}, "");
    this.keep.addEventListener("input", () => this.showKept());
    this.file = element("input", { type: "file", accept: "image/*" });
    this.file.addEventListener("change", () => this.upload());
    this.controls = new Controls("Complete it", [["n", "Samples", 4, 1, 8, 1, null]],
      (signal) => this.complete(signal), showError);
    this.results = element("div",
      { class: "results", role: "radiogroup", "aria-label": "The original and its completions" });
    this.canvas = this.format.canvas({ class: "big", tabindex: 0, role: "application",
      "aria-label": "Image. Arrow keys move over pixels, Enter looks at one.", "aria-describedby": "pixel" });
    this.spot = element("span", { class: "spot", hidden: true });
    this.frame = element("div", { class: "frame" }, this.canvas, this.spot);
    this.status = element("p", { id: "pixel", class: "summary", role: "status" }, "");
    this.shades = new Choice("Show", "shade", ["picture", "bits", "attention"], (value) => {
      this.shadeBy = value;
      this.drawBig();
    });
    this.legends = { bits: heatLegend("0 bits per byte", "8 or more"), attention: heatLegend("weight 0", "largest") };
    this.listen();
    stage.append(
      element("section", { class: "card", "aria-label": "Image" },
        element("div", { class: "field" }, element("span", { class: "name" }, "Bundled image"), this.gallery),
        labelled("Or one of your own, which the browser scales to the model's size", this.file),
        element("label", { class: "field" }, element("span", { class: "name" }, "Rows kept: ", this.kept), this.keep),
        this.controls.form),
      element("section", { class: "card", "aria-label": "Completions" }, this.results),
      element("section", { class: "card", "aria-label": "Pixels" }, 
        element("div", { class: "row spread" }, this.shades.box, Object.values(this.legends)), this.frame, this.status));
    this.panel = new LookPanel(look, about, this.names(), (weights) => this.shade(weights),
      (byte) => this.lookAt(byte), showError);
    this.fillGallery();
    this.pick(this.format.fromSample(samples[0]));
  }

  fillGallery() {
    const thumbs = this.samples.map((sample, index) => {
      const bytes = this.format.fromSample(sample);
      const canvas = this.format.canvas({ "aria-hidden": "true" });
      this.format.draw(canvas, bytes);
      const made = button(canvas, () => {
        this.file.value = "";
        select(thumbs, index);
        this.pick(bytes);
      }, { role: "radio", "aria-label": sample.name });
      return made;
    });
    this.gallery.append(...thumbs);
    roving(this.gallery, thumbs);
    select(thumbs, 0);
    this.thumbs = thumbs;
    this.controls.locked = [...thumbs, this.file, this.keep];
  }

  async upload() {
    const [file] = this.file.files;
    if (!file) return;
    try {
      const bytes = await this.format.fromFile(file);
      select(this.thumbs, -1);
      this.showError(null);
      this.pick(bytes);
    } catch (error) {
      this.showError(error);
    }
  }

  pick(bytes) {
    this.original = bytes;
    this.images = [{ name: "original", bytes, bits: null }];
    this.showResults();
    this.showKept();
    this.chooseImage(0);
    this.fetchBits(this.images[0]);
  }

  showKept() {
    this.kept.textContent = `${this.keep.value} of ${this.format.height}`;
    const share = this.keep.value / this.format.height;
    for (const line of this.results.querySelectorAll(".cut")) line.style.setProperty("--kept", share);
  }

  showResults() {
    const made = this.images.map((image, index) => {
      image.canvas = this.format.canvas({ "aria-hidden": "true" });
      image.caption = element("span", { class: "caption" }, image.name);
      this.format.draw(image.canvas, image.bytes);
      const cut = element("span", { class: "cut", "aria-hidden": "true" });
      return button(element("span", { class: "picture" }, image.canvas, cut), () => this.chooseImage(index),
        { role: "radio", "aria-label": image.name });
    });
    made.forEach((one, index) => one.append(this.images[index].caption));
    this.results.replaceChildren(...made);
    this.resultButtons = made;
    roving(this.results, made);
    for (const image of this.images.filter(({ bits }) => bits)) this.tellBits(image);
    this.showKept();
  }

  async complete(signal) {
    const rows = Number(this.keep.value);
    const prompt = this.original.subarray(0, rows * this.format.row);
    const n = this.controls.get("n");
    const empty = (index) => ({ name: `sample ${index + 1}`, bytes: prompt, bits: null });
    this.images = [this.images[0], ...Array.from({ length: n }, (_, index) => empty(index))];
    this.showResults();
    this.chooseImage(1);
    const body = { model: this.about.name, prompt: Array.from(prompt), n,
      max_tokens: this.format.size - prompt.length, ...this.controls.sampling() };
    try {
      for await (const { index, bytes } of complete(body, signal)) {
        const image = this.images[index + 1];
        image.bytes = joined(image.bytes, bytes);
        this.format.draw(image.canvas, image.bytes);
        if (image === this.image) this.drawBig();
      }
    } finally {
      await Promise.all(this.images.slice(1).map((image) => this.fetchBits(image)));
      this.results.dataset.done = n;
    }
  }

  async fetchBits(image) {
    try {
      const { bits } = await postJson("/page/scores", { bytes: Array.from(image.bytes) });
      image.bits = bits;
      this.tellBits(image);
      if (image === this.image) this.drawBig();
    } catch (error) {
      this.showError(error);
    }
  }

  tellBits(image) {
    image.caption.replaceChildren(image.name, element("br"), `${number(mean(image.bits), 2)} bits/byte`);
  }

  chooseImage(index) {
    this.image = this.images[index];
    select(this.resultButtons, index);
    this.panel?.clear();
    this.cursor = null;
    this.spot.hidden = true;
    this.status.textContent = "";
    this.drawBig();
  }

  shade(weights) {
    this.weights = weights;
    this.shades.enable("attention", weights !== null);
    if (weights) this.shadeBy = "attention";
    else if (this.shadeBy === "attention") this.shadeBy = "picture";
    this.shades.choose(this.shadeBy);
    if (this.image) this.drawBig();
  }

  drawBig() {
    const { image, format } = this;
    let colour = null;
    if (this.shadeBy === "bits" && image.bits) {
      const sums = format.perPixel(image.bits);
      colour = (pixel) => heat(bitsLevel(sums[pixel] / format.channels));
    } else if (this.shadeBy === "attention" && this.weights) {
      const sums = format.perPixel(this.weights);
      const most = sums.reduce((a, b) => Math.max(a, b), 0) || 1;
      colour = (pixel) => {
        const level = sums[pixel] / most;
        const glow = heat(level);
        const share = Math.min(1, 2 * level);
        return format.pixel(image.bytes, pixel).map(
          (value, channel) => Math.round(DIM * value * (1 - level) + glow[channel] * share));
      };
    }
    format.draw(this.canvas, image.bytes, colour);
    for (const [name, legend] of Object.entries(this.legends)) legend.hidden = name !== this.shadeBy;
  }

  // The mouse and the keyboard on the large image.

  listen() {
    this.canvas.addEventListener("click", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const column = Math.floor(((event.clientX - box.left) / box.width) * this.format.width);
      const row = Math.floor(((event.clientY - box.top) / box.height) * this.format.height);
      this.moveTo(row, column);
      this.enter();
    });
    this.canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
      if (moves[event.key]) {
        event.preventDefault();
        const [row, column] = this.cursor ?? [0, -1];
        const [down, right] = moves[event.key];
        this.moveTo(row + down, column + right);
      } else if ((event.key === "Enter" || event.key === " ") && this.cursor) {
        event.preventDefault();
        this.enter();
      }
    });
  }

  moveTo(askedRow, askedColumn) {
    const row = Math.max(0, Math.min(this.format.height - 1, askedRow));
    const column = Math.max(0, Math.min(this.format.width - 1, askedColumn));
    this.cursor = [row, column];
    this.spot.hidden = false;
    this.spot.style.left = `${(100 * column) / this.format.width}%`;
    this.spot.style.top = `${(100 * row) / this.format.height}%`;
    this.spot.style.width = `${100 / this.format.width}%`;
    this.spot.style.height = `${100 / this.format.height}%`;
    const pixel = row * this.format.width + column;
    const start = pixel * this.format.channels;
    const values = Array.from(this.image.bytes.subarray(start, start + this.format.channels));
    const cost = this.image.bits ? mean(this.image.bits, start, start + this.format.channels) : null;
    const bits = cost === null ? "" : `, ${number(cost, 2)} bits/byte`;
    this.status.textContent = `row ${row}, column ${column}: ${values.length ? values.join(", ") + bits : "not there yet"}`;
  }

  enter() {
    const byte = (this.cursor[0] * this.format.width + this.cursor[1]) * this.format.channels;
    if (byte < this.image.bytes.length) this.lookAt(byte);
  }

  lookAt(byte) {
    if (byte === null) {
      this.canvas.focus();
      return;
    }
    const pixel = Math.floor(byte / this.format.channels);
    this.moveTo(Math.floor(pixel / this.format.width), pixel % this.format.width);
    this.panel.show(this.image.bytes, byte);
  }

  names() {
    const where = (byte) => {
      const pixel = Math.floor(byte / this.format.channels);
      const channel = this.channelNames[byte % this.format.channels];
      return [Math.floor(pixel / this.format.width), pixel % this.format.width, channel];
    };
    return {
      invitation: "Choose a pixel of the large image: by a click, or by the arrow keys and Enter.",
      label: String,
      title: (position, bytes) => {
        const [row, column, channel] = where(position);
        return `Row ${row}, column ${column}: ${channel} ${bytes[position]}`;
      },
      place: (byte, position, bytes) => {
        const [row, column, channel] = where(byte);
        const [ownRow, ownColumn] = where(position);
        const there = away(ownRow - row, "up", "down") + away(ownColumn - column, "left", "right");
        return `${channel} ${bytes[byte]}: ${there || "the same pixel"}`;
      },
      panel: (weights, first, bytes, heatColour) => {
        const canvas = this.format.canvas({ "aria-hidden": "true" });
        const sums = this.format.perPixel(weights.subarray(1));
        const most = sums.reduce((a, b) => Math.max(a, b), 0) || 1;
        this.format.draw(canvas, weights.subarray(1), (pixel) => heatColour(sums[pixel] / most));
        return canvas;
      },
    };
  }
}

function away(by, before, after) {
  if (!by) return "";
  return `${Math.abs(by)} ${by > 0 ? before : after} `;
}

function select(buttons, index) {
  buttons.forEach((one, place) => {
    one.setAttribute("aria-checked", place === index);
    one.tabIndex = place === Math.max(0, index) ? 0 : -1;
  });
}

// Arrow keys go from one radio of a group to the next.
function roving(group, buttons) {
  group.onkeydown = (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = buttons[(buttons.indexOf(document.activeElement) + by + buttons.length) % buttons.length];
    next.focus();
    next.click();
  };
}
