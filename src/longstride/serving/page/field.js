// The text as cells, one for each character, shaded by bits or by attention; a keyboard cursor and a chosen byte.

import { bitsLevel } from "./colour.js";
import { cellsOf, joined, openEnd } from "./bytes.js";
import { element, number } from "./dom.js";

let fields = 0;

export class TextField {
  constructor(label, onchoose) {
    fields += 1;
    this.prefix = `cell-${fields}-`;
    this.onchoose = onchoose;
    this.box = element("div", { class: "text", role: "listbox", tabindex: 0, "aria-label": label });
    this.box.addEventListener("click", (event) => this.clicked(event));
    this.box.addEventListener("keydown", (event) => this.pressed(event));
    this.clear();
  }

  clear() {
    this.set(new Uint8Array(0), 0);
  }

  set(bytes, given) {
    this.bytes = bytes;
    this.given = given;
    this.bits = [];
    this.weights = null;
    this.cells = [];
    this.cursor = 0;
    this.chosen = null;
    this.box.removeAttribute("aria-activedescendant");
    this.box.replaceChildren();
    this.addCells(0);
  }

  append(bytes, bits) {
    const open = openEnd(this.bytes);
    for (let place = 0; place < bytes.length; place += 1) this.bits[this.bytes.length + place] = bits[place] ?? null;
    this.bytes = joined(this.bytes, bytes);
    while (this.cells.length && this.cells.at(-1).start >= open) this.cells.pop().span.remove();
    this.addCells(open);
  }

  addCells(start) {
    const made = cellsOf(this.bytes, start);
    const first = this.cells.length;
    for (const [place, cell] of made.entries()) {
      const names = ["cell"];
      if (cell.symbol) names.push("symbol");
      if (cell.start === this.given && this.given > 0) names.push("boundary");
      const id = `${this.prefix}${first + place}`;
      cell.span = element("span", { class: names.join(" "), role: "option", id }, cell.text);
      this.cells.push(cell);
      this.paint(cell);
    }
    this.box.append(...made.map((cell) => cell.span));
  }

  setBits(bits) {
    this.bits = bits;
    this.repaint();
  }

  // weights: of every byte, from 0 to 1; null to shade by bits.
  setWeights(weights) {
    this.weights = weights;
    this.box.classList.toggle("by-attention", weights !== null);
    this.repaint();
  }

  repaint() {
    for (const cell of this.cells) this.paint(cell);
  }

  bitsOf(cell) {
    let sum = 0;
    for (let place = cell.start; place < cell.start + cell.length; place += 1) {
      if (this.bits[place] === null || this.bits[place] === undefined) return null;
      sum += this.bits[place];
    }
    return sum;
  }

  paint(cell) {
    let level = 0;
    if (this.weights) {
      for (let place = cell.start; place < cell.start + cell.length; place += 1) {
        level = Math.max(level, this.weights[place] ?? 0);
      }
    } else {
      level = bitsLevel(this.bitsOf(cell) ?? 0);
    }
    cell.span.style.setProperty("--level", level.toFixed(3));
  }

  cellAt(byte) {
    let low = 0;
    let high = this.cells.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.cells[middle].start <= byte) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  choose(byte) {
    if (this.chosen !== null) {
      const old = this.cells[this.cellAt(this.chosen)].span;
      old.removeAttribute("aria-selected");
    }
    this.chosen = byte;
    if (byte === null) return;
    const index = this.cellAt(byte);
    this.cells[index].span.setAttribute("aria-selected", "true");
    this.moveTo(index);
  }

  clicked(event) {
    const span = event.target.closest(".cell");
    if (!span) return;
    this.onchoose(this.cells[Number(span.id.slice(this.prefix.length))].start);
  }

  pressed(event) {
    const last = this.cells.length - 1;
    if (last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {
      ArrowRight: () => Math.min(last, this.cursor + 1),
      ArrowLeft: () => Math.max(0, this.cursor - 1),
      ArrowDown: () => this.lineAway(1),
      ArrowUp: () => this.lineAway(-1),
      Home: () => 0,
      End: () => last,
    };
    if (moves[event.key]) {
      event.preventDefault();
      this.moveTo(moves[event.key]());
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.onchoose(this.cells[this.cursor].start);
    }
  }

  moveTo(index) {
    this.cells[this.cursor]?.span.classList.remove("cursor");
    this.cursor = index;
    const cell = this.cells[index];
    const bits = this.bitsOf(cell);
    cell.span.classList.add("cursor");
    const cost = bits === null ? "" : `, ${number(bits, 1)} bits`;
    cell.span.setAttribute("aria-label", `${cell.text.trim() || "space"}${cost}`);
    this.box.setAttribute("aria-activedescendant", cell.span.id);
    cell.span.scrollIntoView({ block: "nearest" });
  }

  // The cell above or below the cursor, by where the text lies on the screen.
  lineAway(direction) {
    const here = this.cells[this.cursor].span.getBoundingClientRect();
    let best = this.cursor;
    let line = null;
    for (let index = this.cursor + direction; this.cells[index]; index += direction) {
      const there = this.cells[index].span.getClientRects()[0];
      if (!there || Math.abs(there.top - here.top) < here.height / 2) continue;
      line ??= there.top;
      if (Math.abs(there.top - line) >= there.height / 2) break;
      const away = Math.abs(there.left - here.left);
      if (best === this.cursor || away < Math.abs(this.cells[best].span.getClientRects()[0].left - here.left)) best = index;
    }
    return best;
  }
}
