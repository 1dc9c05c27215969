// Sound: play it, let the model go on, look at a sample.

import { complete, postJson } from "./api.js";
import { joined, soundOf } from "./bytes.js";
import { bitsLevel, heat, heatLegend } from "./colour.js";
import { Controls } from "./controls.js";
import { button, Choice, count, element, labelled, mean, number, onTheme, themeColour } from "./dom.js";
import { LookPanel, matrixPanel } from "./look.js";
import { fromFile, Player } from "./sound.js";

const CLOSE = 160; // samples of the close view
const LEAP = 16; // samples that an arrow key moves with Shift

export class AudioView {
  constructor(stage, look, about, samples, showError) {
    Object.assign(this, { about, showError, samples, rate: about.rate });
    Object.assign(this, { bytes: new Uint8Array(0), given: 0, bits: null, weights: null, cursor: null, heard: null });
    this.player = new Player(this.rate, (byte) => this.follow(byte));
    const half = Math.max(1, about.context >> 1);
    this.select = element("select", {}, samples.map((sample, index) => element("option", { value: index }, sample.name)));
    this.select.addEventListener("change", () => {
      this.file.value = "";
      this.pick(Uint8Array.from(samples[Number(this.select.value)].bytes));
    });
    this.file = element("input", { type: "file", accept: "audio/*" });
    this.file.addEventListener("change", () => this.upload());
    const milliseconds = (bytes) => Math.max(1, Math.floor((1000 * bytes) / this.rate));
    this.controls = new Controls("Continue",
      [["ms", "Milliseconds", milliseconds(half), 1, milliseconds(about.most_bytes), 1, null]],
      (signal) => this.continue(signal, this.bytes.subarray(0, this.given)), showError);
    this.controls.locked = [this.select, this.file];
    this.more = this.controls.addAction("Go on", (signal) => this.continue(signal, this.bytes));
    this.playButton = button("Play", () => this.togglePlay());
    this.playNew = button("Play what is new", () => this.player.play(this.bytes, this.given), { disabled: true });
    const keys = "Arrow keys move, with Shift further; Enter looks at a sample.";
    this.wave = this.makeCanvas(`The whole sound. ${keys}`, () => [0, this.bytes.length]);
    this.close = this.makeCanvas(`Around the chosen sample. ${keys}`, () => this.closeRange());
    this.summary = element("p", { class: "summary", "aria-live": "polite" });
    this.status = element("p", { class: "summary", role: "status", id: "sample" },
      "Choose a sample by a click, or by the arrow keys.");
    this.shades = new Choice("Shade by", "shade", ["nothing", "bits", "attention"], () => this.draw());
    this.legends = { bits: heatLegend("0 bits", "8 or more"), attention: heatLegend("weight 0", "largest") };
    stage.append(
      element("section", { class: "card", "aria-label": "Sound" },
        labelled("Bundled sound", this.select),
        labelled("Or one of your own, of which the beginning is used", this.file),
        this.controls.form),
      element("section", { class: "card", "aria-label": "Wave" },
        element("div", { class: "row spread" }, this.summary,
          element("div", { class: "actions" }, this.playButton, this.playNew)),
        element("div", { class: "row spread" }, this.shades.box, Object.values(this.legends)),
        this.wave, this.close, this.status));
    this.panel = new LookPanel(look, about, this.names(), (weights) => this.shade(weights),
      (byte) => this.lookAt(byte), showError);
    new ResizeObserver(() => this.draw()).observe(this.wave);
    onTheme(() => this.draw());
    if (samples.length) this.pick(Uint8Array.from(samples[0].bytes));
  }

  makeCanvas(label, range) {
    const canvas = element("canvas",
      { class: "wave", tabindex: 0, role: "application", "aria-label": label, "aria-describedby": "sample" });
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const [from, to] = range();
      const byte = from + Math.floor(((event.clientX - box.left) / box.width) * (to - from));
      if (this.bytes.length) this.lookAt(Math.max(0, Math.min(this.bytes.length - 1, byte)));
    });
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by && this.bytes.length) {
        event.preventDefault();
        const next = (this.cursor ?? this.given - 1) + by * (event.shiftKey ? LEAP : 1);
        this.moveTo(Math.max(0, Math.min(this.bytes.length - 1, next)));
      } else if ((event.key === "Enter" || event.key === " ") && this.cursor !== null) {
        event.preventDefault();
        this.lookAt(this.cursor);
      }
    });
    return canvas;
  }

  async upload() {
    const [file] = this.file.files;
    if (!file) return;
    try {
      const bytes = await fromFile(file, this.rate, Math.max(1, this.about.context >> 1));
      if (!bytes.length) throw new Error(`${file.name} is empty.`);
      this.showError(null);
      this.select.selectedIndex = -1; // So that every bundled sound can be chosen.
      this.pick(bytes);
    } catch (error) {
      this.showError(error);
    }
  }

  pick(bytes) {
    this.set(bytes, bytes.length);
    this.fetchBits().catch((error) => this.showError(error));
  }

  set(bytes, given) {
    this.player.stop();
    Object.assign(this, { bytes, given, bits: null, cursor: null });
    this.playNew.disabled = true;
    this.panel.clear();
    this.tell();
    this.draw();
  }

  async continue(signal, prompt) {
    this.set(prompt.slice(), prompt.length);
    const wanted = Math.max(1, Math.round((this.controls.get("ms") * this.rate) / 1000));
    const body = { model: this.about.name, prompt: Array.from(prompt), overflow: "slide",
      max_tokens: Math.min(wanted, this.about.most_bytes - prompt.length), ...this.controls.sampling() };
    this.more.disabled = true;
    try {
      for await (const { bytes } of complete(body, signal)) {
        this.bytes = joined(this.bytes, bytes);
        this.tell();
        this.draw();
      }
    } finally {
      this.more.disabled = this.bytes.length >= this.about.most_bytes;
      this.playNew.disabled = this.bytes.length === this.given;
      await this.fetchBits();
      this.wave.dataset.done = this.bytes.length - this.given;
    }
  }

  async fetchBits() {
    const { bytes } = this;
    const { bits } = await postJson("/page/scores", { bytes: Array.from(bytes) });
    if (bytes !== this.bytes) return;
    this.bits = bits;
    this.tell();
    this.draw();
  }

  tell() {
    const parts = [["given", 0, this.given], ["new", this.given, this.bytes.length]].filter(([, from, to]) => to > from);
    this.summary.replaceChildren(...parts.map(([name, from, to]) => element("span", { class: "figure" },
      this.bits ? element("strong", {}, number(mean(this.bits, from, to), 3)) : null,
      this.bits ? " bits per byte, " : null, `${number((1000 * (to - from)) / this.rate, 0)} ms ${name}`)));
  }

  togglePlay() {
    if (this.player.playing) this.player.stop();
    else this.player.play(this.bytes);
  }

  follow(byte) {
    this.heard = byte;
    this.playButton.textContent = byte === null ? "Play" : "Stop playing";
    this.draw();
  }

  shade(weights) {
    this.weights = weights;
    this.shades.enable("attention", weights !== null);
    if (weights) this.shades.choose("attention");
    else if (this.shadeBy === "attention") this.shades.choose("nothing");
    this.draw();
  }

  get shadeBy() {
    return [...this.shades.inputs].find(([, input]) => input.checked)[0];
  }

  closeRange() {
    const middle = this.cursor ?? this.given;
    const from = Math.max(0, Math.min(this.bytes.length - CLOSE, middle - (CLOSE >> 1)));
    return [from, Math.min(this.bytes.length, from + CLOSE)];
  }

  draw() {
    if (!this.wave.isConnected) return;
    for (const [name, legend] of Object.entries(this.legends)) legend.hidden = name !== this.shadeBy;
    this.drawWave(this.wave, 0, Math.max(1, this.bytes.length));
    const [from, to] = this.closeRange();
    this.drawWave(this.close, from, Math.max(from + 1, to));
  }

  drawWave(canvas, from, to) {
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(canvas.clientWidth * scale));
    const height = Math.max(1, Math.round(canvas.clientHeight * scale));
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const paint = canvas.getContext("2d");
    paint.clearRect(0, 0, width, height);
    const x = (byte) => ((byte - from) / (to - from)) * width;
    const y = (sample) => height / 2 - sample * (height / 2 - 4 * scale);
    this.drawShade(paint, from, to, width, height);
    const wide = width / (to - from);
    const level = Math.max(0.05, this.bytes.reduce((most, code) => Math.max(most, Math.abs(soundOf(code))), 0));
    const dark = this.shadeBy !== "nothing" && (this.shadeBy === "bits" ? this.bits : this.weights);
    const parts = [[from, Math.min(to, this.given), "--wave"], [Math.max(from, this.given), to, "--wave-new"]];
    for (const [begin, end, colour] of parts) {
      paint.strokeStyle = dark ? "#ffffff" : themeColour(colour);
      paint.lineWidth = (wide > 3 ? 2 : 1) * scale;
      paint.beginPath();
      for (let byte = Math.max(from, begin - 1); byte < Math.min(end, this.bytes.length); byte += 1) {
        const place = [x(byte + 0.5), y(soundOf(this.bytes[byte]) / level)];
        if (byte === Math.max(from, begin - 1)) paint.moveTo(...place);
        else paint.lineTo(...place);
      }
      paint.stroke();
    }
    const mark = (byte, colour, thick) => {
      if (byte === null || byte < from || byte > to) return;
      paint.fillStyle = colour;
      paint.fillRect(x(byte) - (thick * scale) / 2, 0, thick * scale, height);
    };
    if (this.given < this.bytes.length) mark(this.given, themeColour("--accent"), 2);
    mark(this.heard, themeColour("--mark"), 2);
    if (this.cursor !== null) {
      paint.strokeStyle = dark ? "#6bc1ff" : themeColour("--ink");
      paint.lineWidth = 2 * scale;
      const thick = Math.max(wide, 4 * scale);
      paint.strokeRect(x(this.cursor + 0.5) - thick / 2, scale, thick, height - 2 * scale);
    }
  }

  // The bits or weights of the samples, as bands behind the wave; of several in one column the largest.
  drawShade(paint, from, to, width, height) {
    const values = this.shadeBy === "bits" ? this.bits : this.weights;
    if (this.shadeBy === "nothing" || !values) return;
    const level = this.shadeBy === "bits" ? (value) => bitsLevel(value ?? 0) : (value) => value;
    for (let column = 0; column < width; column += 1) {
      const begin = from + Math.floor((column / width) * (to - from));
      const end = Math.max(begin + 1, from + Math.floor(((column + 1) / width) * (to - from)));
      let largest = 0;
      for (let byte = begin; byte < Math.min(end, this.bytes.length); byte += 1) {
        largest = Math.max(largest, level(values[byte] ?? 0));
      }
      const [red, green, blue] = heat(0.85 * largest);
      paint.fillStyle = `rgb(${red} ${green} ${blue})`;
      paint.fillRect(column, 0, 1, height);
    }
  }

  moveTo(byte) {
    this.cursor = byte;
    const bits = this.bits?.[byte];
    const cost = bits === undefined || bits === null ? "" : `, ${number(bits, 2)} bits`;
    this.status.textContent = `${number((1000 * byte) / this.rate, 1)} ms, sample ${byte.toLocaleString("en")}: `
      + `${number(soundOf(this.bytes[byte]), 3)} (byte ${this.bytes[byte]})${cost}`;
    this.draw();
  }

  lookAt(byte) {
    if (byte === null) {
      this.wave.focus();
      return;
    }
    this.moveTo(byte);
    this.panel.show(this.bytes, byte);
  }

  names() {
    const signed = (byte) => `${soundOf(byte) < 0 ? "−" : "+"}${Math.abs(soundOf(byte)).toFixed(3)}`;
    return {
      invitation: "Choose a sample of the wave: by a click, or by the arrow keys and Enter.",
      label: signed,
      title: (position, bytes) => `${number((1000 * position) / this.rate, 1)} ms: ${signed(bytes[position])}`,
      place: (byte, position, bytes) => `${signed(bytes[byte])}, ${count(position - byte, "sample")} back`,
      panel: (weights, first, bytes, heatColour) => matrixPanel(weights, this.about.columns, heatColour),
    };
  }
}
