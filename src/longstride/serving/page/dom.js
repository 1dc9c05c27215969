// Elements and numbers. Text always becomes a text node: nothing that comes from a model is read as markup.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(label, onclick, properties = {}) {
  return element("button", { type: "button", onclick, ...properties }, label);
}

// A label above its control; `hint` explains it to everybody.
export function labelled(label, control, hint) {
  const parts = [element("span", { class: "name" }, label), control];
  if (hint) parts.push(element("small", {}, hint));
  return element("label", { class: "field" }, parts);
}

// Radio buttons in one line.
export class Choice {
  constructor(legend, name, options, onchange) {
    this.inputs = new Map();
    const labels = options.map((value) => {
      const input = element("input", { type: "radio", name, value, checked: value === options[0] });
      input.addEventListener("change", () => onchange(value));
      this.inputs.set(value, input);
      return element("label", {}, input, element("span", {}, value));
    });
    this.box = element("fieldset", { class: "choice" }, element("legend", {}, legend), labels);
  }

  choose(value) {
    for (const [name, input] of this.inputs) input.checked = name === value;
  }

  enable(value, possible) {
    this.inputs.get(value).disabled = !possible;
  }
}

// A text that may be broken inside patterns and addresses: they are long, and their words stay whole.
export function breakable(text) {
  return String(text).split(/(?<=\w\(|\/)(?!\/)/).flatMap((part, index) => (index ? [element("wbr"), part] : [part]));
}

export function number(value, digits = 2) {
  return Number.isFinite(value) ? value.toFixed(digits) : "not finite";
}

export function count(value, noun) {
  return `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
}

export function percent(share) {
  if (share >= 0.095) return `${Math.round(100 * share)} %`;
  if (share >= 0.001) return `${(100 * share).toFixed(1)} %`;
  return share > 0 ? "< 0.1 %" : "0 %";
}

export function mean(values, from = 0, to = values.length) {
  let sum = 0;
  let known = 0;
  for (let place = from; place < to; place += 1) {
    if (values[place] === null || values[place] === undefined) continue;
    sum += values[place];
    known += 1;
  }
  return known ? sum / known : NaN;
}

// Calls a function when the colours of the system change between light and dark.
export function onTheme(redraw) {
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
