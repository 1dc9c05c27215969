// Text and other streams of bytes: write with the model, see the bits of each byte, look at one.

import { complete, postJson } from "./api.js";
import { decodeText, encodeText, letter, letterName } from "./bytes.js";
import { legend } from "./colour.js";
import { Controls } from "./controls.js";
import { button, Choice, count, element, labelled, mean, number } from "./dom.js";
import { TextField } from "./field.js";
import { LookPanel, matrixPanel } from "./look.js";

const AROUND = 8; // bytes on each side of one that a head looked at

export class TextView {
  constructor(stage, look, about, samples, showError) {
    Object.assign(this, { about, showError });
    const room = Math.max(1, about.context >> 1);
    this.prompt = element("textarea", { rows: 5, spellcheck: "false", autocomplete: "off" });
    this.prompt.value = samples.length ? opening(samples[0].bytes) : "";
    this.controls = new Controls("Continue", [["length", "Bytes", Math.min(300, room), 1, about.most_bytes, 1, null]],
      (signal) => this.write(signal, encodeText(this.prompt.value)), showError);
    this.more = this.controls.addAction("Go on", (signal) => this.write(signal, this.field.bytes));
    this.more.title = "Continue what is shown below";
    const score = button("Only bits", () => this.controls.run((signal) => this.score(signal)),
      { title: "The bits of the text as it is, without a continuation" });
    this.controls.actions.insertBefore(score, this.more);
    this.field = new TextField("Text, byte by byte. Arrow keys move, Enter looks at a byte.", (byte) => this.lookAt(byte));
    this.summary = element("p", { class: "summary", "aria-live": "polite" },
      "Nothing here yet: continue the text, or ask for its bits.");
    this.shades = new Choice("Shade by", "shade", ["bits", "attention"], () => this.repaint());
    this.legends = { bits: legend("bits", "0 bits", "8 or more"), attention: legend("attention", "weight 0", "largest") };
    this.scale = element("div", { class: "row spread", hidden: true }, this.shades.box, Object.values(this.legends));
    this.result = element("section", { class: "card", "aria-label": "Result" }, this.summary, this.scale, this.field.box);
    this.field.box.hidden = true;
    stage.append(
      element("section", { class: "card", "aria-label": "Prompt" },
        ...this.examples(samples), labelled("Text", this.prompt), this.controls.form),
      this.result);
    this.panel = new LookPanel(look, about, this.names(), (weights) => this.shade(weights),
      (byte) => this.lookAt(byte), showError);
  }

  examples(samples) {
    if (!samples.length) return [];
    const select = element("select", {}, samples.map((sample, index) => element("option", { value: index }, sample.name)));
    select.addEventListener("change", () => { this.prompt.value = opening(samples[Number(select.value)].bytes); });
    return [labelled("Example", select)];
  }

  names() {
    return {
      invitation: "Choose a byte of the text: by a click, or by the arrow keys and Enter.",
      label: letterName,
      title: (position, bytes) => `Byte ${position.toLocaleString("en")}: ${letterName(bytes[position])}`,
      place: (byte, position, bytes) => {
        const part = (from, to) => Array.from(bytes.subarray(Math.max(0, from), Math.min(position, to)), letter).join("");
        return element("span", { class: "around" }, part(byte - AROUND, byte), element("mark", {}, part(byte, byte + 1)),
          part(byte + 1, byte + 1 + AROUND), element("small", {}, ` ${position - byte} back`));
      },
      panel: (weights, first, bytes, heat) => matrixPanel(weights, this.about.columns, heat),
    };
  }

  shade(weights) {
    this.weights = weights;
    this.shades.enable("attention", weights !== null);
    this.shades.choose(weights ? "attention" : "bits");
    this.repaint();
  }

  repaint() {
    const byAttention = this.shades.inputs.get("attention").checked;
    this.field.setWeights(byAttention ? this.weights : null);
    this.legends.bits.hidden = byAttention;
    this.legends.attention.hidden = !byAttention;
  }

  begin(bytes, given) {
    this.panel.clear();
    this.field.box.hidden = false;
    this.scale.hidden = false;
    this.field.set(bytes, given);
    this.more.disabled = true;
    this.summary.textContent = "Reading …";
  }

  async write(signal, prompt) {
    const room = this.about.most_bytes - prompt.length;
    if (!prompt.length) throw new Error("Give a text to continue.");
    if (room < 1) throw new Error(`Give less than ${count(this.about.most_bytes, "byte")} to continue.`);
    this.begin(prompt, prompt.length);
    const body = { model: this.about.name, prompt: Array.from(prompt), overflow: "slide", logprobs: 0,
      max_tokens: Math.min(room, this.controls.get("length")), ...this.controls.sampling() };
    const begun = performance.now();
    let written = 0;
    try {
      for await (const { bytes, bits } of complete(body, signal)) {
        this.field.append(bytes, bits);
        written += bytes.length;
        const rate = (1000 * written) / Math.max(1, performance.now() - begun);
        this.summary.textContent = `Writing: ${count(written, "byte")}, ${Math.round(rate).toLocaleString("en")} bytes/s`;
      }
    } finally {
      this.more.disabled = this.field.bytes.length >= this.about.most_bytes;
      await this.fetchBits();
    }
  }

  async score(signal) {
    const bytes = encodeText(this.prompt.value);
    if (!bytes.length) throw new Error("Give a text to measure.");
    this.begin(bytes, bytes.length);
    this.more.disabled = false;
    await this.fetchBits(signal);
  }

  async fetchBits(signal) {
    const { bytes, given } = this.field;
    let bits;
    try {
      ({ bits } = await postJson("/page/scores", { bytes: Array.from(bytes) }, signal));
    } catch (error) {
      this.summary.textContent = `${count(bytes.length, "byte")}, not measured.`;
      throw error;
    }
    this.field.setBits(bits);
    const parts = [["given", 0, given], ["written", given, bytes.length]].filter(([, from, to]) => to > from);
    this.summary.replaceChildren(...parts.map(([name, from, to]) => element("span", { class: "figure" },
      element("strong", {}, number(mean(bits, from, to), 3)), ` bits per byte, ${count(to - from, "byte")} ${name}`)));
  }

  lookAt(byte) {
    this.field.choose(byte);
    if (byte === null) this.field.box.focus();
    else this.panel.show(this.field.bytes, byte);
  }
}

// The text of an example, up to the last whole word.
function opening(bytes) {
  const text = decodeText(Uint8Array.from(bytes)).replace(/\uFFFD$/, "");
  const end = text.lastIndexOf(" ");
  return end > 0 ? text.slice(0, end) : text;
}
