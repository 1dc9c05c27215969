// How to sample: a form with temperature, top p, seed and more, its start and its stop.

import { button, element, labelled } from "./dom.js";

const SEEDS = 2 ** 31;

function numberInput(name, value, least, most, step) {
  return element("input",
    { type: "number", name, value, min: least, max: most, step, required: true, inputmode: "decimal" });
}

export class Controls {
  // extra: [name, label, value, least, most, step, hint] of further numbers. start: called with an AbortSignal.
  constructor(label, extra, start, showError) {
    this.showError = showError;
    this.inputs = new Map();
    this.seedInput = numberInput("seed", 1, 0, SEEDS - 1, 1);
    const fields = [];
    for (const [name, text, value, least, most, step, hint] of [
      ...extra,
      ["temperature", "Temperature", 1, 0, 2, "any", null],
      ["top_p", "Top p", 1, 0.01, 1, "any", null],
    ]) {
      const input = numberInput(name, value, least, most, step);
      this.inputs.set(name, input);
      fields.push(labelled(text, input, hint));
    }
    fields.push(labelled("Seed", this.seedInput));
    this.startButton = element("button", { type: "submit", class: "primary" }, label);
    this.stopButton = button("Stop", () => this.controller?.abort(), { disabled: true });
    this.fresh = element("input", { type: "checkbox", checked: true });
    this.actions = element("div", { class: "actions" }, this.startButton, this.stopButton);
    const seedChoice = element("label", { class: "check" }, this.fresh, element("span", {}, "another seed each time"));
    this.form = element("form", { class: "controls" },
      element("div", { class: "fields" }, fields),
      element("div", { class: "row" }, this.actions, seedChoice));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run(start);
    });
    this.used = false;
    this.locked = []; // Elements that rest while it runs.
  }

  addAction(label, start) {
    const made = button(label, () => this.form.reportValidity() && this.run(start), { disabled: true });
    this.actions.insertBefore(made, this.stopButton);
    return made;
  }

  get(name) {
    return Number(this.inputs.get(name).value);
  }

  // What the API takes. The first run has the seed that is shown.
  sampling() {
    if (this.used && this.fresh.checked) this.seedInput.value = Math.floor(Math.random() * SEEDS);
    this.used = true;
    return { temperature: this.get("temperature"), top_p: this.get("top_p"), seed: Number(this.seedInput.value) };
  }

  get running() {
    return Boolean(this.controller);
  }

  async run(work) {
    if (this.running) return;
    this.controller = new AbortController();
    this.startButton.disabled = true;
    this.stopButton.disabled = false;
    for (const one of this.locked) one.disabled = true;
    this.form.setAttribute("aria-busy", "true");
    this.showError(null);
    try {
      await work(this.controller.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.showError(error);
    } finally {
      this.controller = null;
      this.startButton.disabled = false;
      this.stopButton.disabled = true;
      for (const one of this.locked) one.disabled = false;
      this.form.removeAttribute("aria-busy");
    }
  }
}
