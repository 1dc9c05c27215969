// One byte: the bytes that the model thought likely there, and where each layer and head looked.

import { postJson } from "./api.js";
import { fromBase64 } from "./bytes.js";
import { heat } from "./colour.js";
import { button, element, number, percent } from "./dom.js";

const MOST_BARS = 8;
const PLACES = 5; // that the chosen head looked at most, in words
const ALL = "all";
const MOST_COLUMNS = 4; // of panels
const MOST_ACROSS = 48; // cells of a panel, which has about as many pixels
const MOST_DOWN = 40;

// What the answer says of a position, with the weights of one head or of all.
class Seen {
  constructor(answer, heads) {
    Object.assign(this, answer);
    this.heads = heads;
    this.levels = fromBase64(answer.levels);
    this.keys = this.levels.length / (answer.layers.length * heads);
  }

  // Weights of the keys of one head; row: its place in `layers`.
  weights(row, head) {
    const start = (row * this.heads + head) * this.keys;
    const largest = this.maxima[row][head];
    return Float32Array.from(this.levels.subarray(start, start + this.keys), (level) => (level / 255) * largest);
  }

  average() {
    const sum = new Float32Array(this.keys);
    const all = this.layers.length * this.heads;
    for (let row = 0; row < this.layers.length; row += 1) {
      for (let head = 0; head < this.heads; head += 1) {
        this.weights(row, head).forEach((weight, key) => { sum[key] += weight / all; });
      }
    }
    return sum;
  }
}

export class LookPanel {
  // kind: how the view names bytes and places, with label(byte), place(byte, position, bytes) and title(position, bytes).
  // onshade(weights): of every byte, from 0 to 1, when a head is chosen; null when no byte is.
  // onstep(position): another byte was asked for; null if none.
  constructor(box, about, kind, onshade, onstep, showError) {
    Object.assign(this, { box, about, kind, onshade, onstep, showError });
    this.head = ALL;
    this.clear();
  }

  clear() {
    this.request?.abort();
    this.seen = null;
    this.box.classList.add("empty");
    this.box.replaceChildren(
      element("h2", {}, "One byte"),
      element("p", { class: "hint" }, this.kind.invitation));
    this.onshade(null);
  }

  async show(bytes, position, layers) {
    this.request?.abort();
    this.request = new AbortController();
    this.box.setAttribute("aria-busy", "true");
    try {
      const body = { bytes: Array.from(bytes), position, ...(layers ? { layers } : {}) };
      const answer = await postJson("/page/look", body, this.request.signal);
      Object.assign(this, { bytes, position, seen: new Seen(answer, this.about.heads) });
      if (this.head !== ALL && !this.seen.layers.includes(this.head[0])) this.head = ALL;
      this.draw();
    } catch (error) {
      if (error.name !== "AbortError") this.showError(error);
    } finally {
      this.box.removeAttribute("aria-busy");
    }
  }

  draw() {
    const { seen } = this;
    const focused = this.box.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    this.box.classList.remove("empty");
    const step = (by, label, sign) => button(sign, () => this.onstep(this.position + by),
      { class: "small", "aria-label": label, title: label, "data-focus": label,
        disabled: this.position + by < 0 || this.position + by >= this.bytes.length });
    this.places = element("div", { class: "places" });
    this.panels = element("div", { class: "heads" });
    this.box.replaceChildren(
      element("div", { class: "row spread" },
        element("h2", {}, this.kind.title(this.position, this.bytes)),
        element("span", { class: "steps" }, step(-1, "previous byte", "‹"), step(1, "next byte", "›"),
          button("×", () => { this.clear(); this.onstep(null); },
            { class: "small", "aria-label": "close", title: "close", "data-focus": "close" }))),
      element("p", { class: "facts" }, this.facts()),
      this.bars(),
      element("h3", {}, "Where the heads looked"),
      this.places,
      this.panels,
      ...this.otherLayers());
    this.drawPanels();
    this.applyHead();
    if (focused) this.box.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
    this.box.dataset.position = this.position;
    if (seen.maxima.flat().every((value) => value === 0)) this.places.replaceChildren("No head sees anything yet.");
  }

  facts() {
    const { seen } = this;
    const bits = -Math.log2(seen.probability);
    const entropy = number(seen.entropy, 2);
    return `${number(bits, 2)} bits · ${percent(seen.probability)} · rank ${seen.rank} · entropy ${entropy} bits`;
  }

  bars() {
    const { seen } = this;
    const shown = seen.likely.slice(0, MOST_BARS);
    if (!shown.some(([byte]) => byte === seen.byte)) shown.push([seen.byte, seen.probability]);
    const largest = shown[0][1] || 1;
    return element("ol", { class: "bars", "aria-label": "Likely bytes" }, shown.map(([byte, chance]) => {
      const bar = element("span", { class: "bar", "aria-hidden": "true" });
      bar.style.setProperty("--share", chance / largest);
      return element("li", { class: byte === seen.byte ? "actual" : null },
        element("span", { class: "what" }, this.kind.label(byte)), bar,
        element("span", { class: "chance" }, percent(chance)));
    }));
  }

  otherLayers() {
    if (this.seen.layers.length === this.about.layers) return [];
    const select = element("select", { "data-focus": "layers" },
      element("option", { value: "" }, `${this.seen.layers.length} of ${this.about.layers}`),
      Array.from({ length: this.about.layers }, (_, layer) => element("option", { value: layer }, `layer ${layer}`)));
    select.addEventListener("change", () => this.show(this.bytes, this.position,
      select.value === "" ? undefined : [Number(select.value)]));
    return [element("label", { class: "field" }, element("span", { class: "name" }, "Layers shown"), select)];
  }

  drawPanels() {
    const { seen, about } = this;
    const radios = [this.radio(ALL, "mean of all heads", seen.average(), Math.max(...seen.maxima.flat()))];
    const rows = [element("div", { class: "layer", role: "presentation" },
      element("span", { class: "name" }, "all"), element("div", { class: "panels" }, radios[0]))];
    seen.layers.forEach((layer, row) => {
      const patterns = about.patterns[layer % about.patterns.length];
      const made = patterns.map((pattern, head) => {
        const name = `layer ${layer}, head ${head}: ${pattern}`;
        return this.radio([layer, head], name, seen.weights(row, head), seen.maxima[row][head]);
      });
      radios.push(...made);
      rows.push(element("div", { class: "layer", role: "presentation" },
        element("span", { class: "name" }, `layer ${layer}`), element("div", { class: "panels" }, made)));
    });
    this.radios = radios;
    this.panels.setAttribute("role", "radiogroup");
    this.panels.setAttribute("aria-label", "Heads");
    this.panels.style.setProperty("--columns", Math.min(MOST_COLUMNS, Math.max(2, about.heads)));
    this.panels.replaceChildren(...rows);
    this.panels.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowDown: about.heads, ArrowLeft: -1, ArrowUp: -about.heads }[event.key];
      if (!by) return;
      event.preventDefault();
      const here = radios.indexOf(document.activeElement);
      const there = Math.max(0, Math.min(radios.length - 1, here === 0 && by > 0 ? 1 : here + by));
      radios[there].focus();
      radios[there].click();
    };
  }

  radio(value, name, weights, largest) {
    const canvas = this.kind.panel(weights, this.seen.first, this.bytes, heat);
    const made = button(canvas, () => {
      this.head = value;
      this.applyHead();
    }, { role: "radio", title: name, "aria-label": `${name}, at most ${percent(largest)}`, class: "panel",
      "data-focus": String(value) });
    made.value = String(value);
    return made;
  }

  // Shades the view by the chosen head, and says in words where it looked.
  applyHead() {
    const { seen } = this;
    for (const radio of this.radios) {
      const chosen = radio.value === String(this.head);
      radio.setAttribute("aria-checked", chosen);
      radio.tabIndex = chosen ? 0 : -1;
    }
    const weights = this.head === ALL ? seen.average() : seen.weights(seen.layers.indexOf(this.head[0]), this.head[1]);
    const order = Array.from(weights.keys()).filter((key) => weights[key] > 0).sort((a, b) => weights[b] - weights[a]);
    const name = this.head === ALL ? "All heads, on average" : this.radios.find((one) => one.tabIndex === 0).title;
    this.places.replaceChildren(
      element("p", { class: "name" }, name),
      element("ul", {}, order.slice(0, PLACES).map((key) => element("li", {},
        element("span", { class: "chance" }, percent(weights[key])),
        element("span", {}, key === 0 ? "the start" : this.kind.place(seen.first + key - 1, this.position, this.bytes))))));
    if (!order.length) this.places.append(element("p", { class: "hint" }, "This head sees nothing from here."));
    const read = new Float32Array(this.bytes.length);
    for (let key = 1; key < weights.length; key += 1) read[seen.first + key - 1] = weights[key];
    const most = read.reduce((a, b) => Math.max(a, b), 0) || 1;
    this.onshade(read.map((weight) => weight / most));
  }
}

// The weights of a stream as a matrix whose rows are as long as the stride. Byte j is at cell j. A matrix that is larger
// than its picture shows the largest weight of each group of cells: single keys among thousands stay visible.
export function matrixPanel(weights, columns, heatColour) {
  const cells = Math.max(1, weights.length - 1);
  const width = Math.min(columns, cells);
  const across = Math.ceil(width / MOST_ACROSS);
  const down = Math.ceil(Math.ceil(cells / width) / MOST_DOWN);
  const canvas = element("canvas", { width: Math.ceil(width / across), height: Math.ceil(cells / (width * down)),
    class: "matrix", "aria-hidden": "true" });
  const shown = new Float32Array(canvas.width * canvas.height).fill(-1); // Beyond the last byte nothing is drawn.
  for (let key = 1; key < weights.length; key += 1) {
    const row = Math.floor((key - 1) / (width * down));
    const cell = row * canvas.width + Math.floor(((key - 1) % width) / across);
    shown[cell] = Math.max(shown[cell], weights[key]);
  }
  const paint = canvas.getContext("2d");
  const image = paint.createImageData(canvas.width, canvas.height);
  const most = shown.reduce((a, b) => Math.max(a, b), 0) || 1;
  shown.forEach((weight, cell) => {
    if (weight >= 0) image.data.set([...heatColour(weight / most), 255], 4 * cell);
  });
  paint.putImageData(image, 0, 0);
  return canvas;
}
