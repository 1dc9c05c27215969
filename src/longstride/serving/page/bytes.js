// Bytes as characters, as samples of sound and as labels.

const LONGEST = 4; // bytes of a character in UTF-8
const UNPRINTABLE = /[\p{C}\p{Zl}\p{Zp}]/u;
const MARK = /\p{M}/u;
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export function encodeText(text) {
  return new TextEncoder().encode(text);
}

export function decodeText(bytes) {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}

function characterLength(first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return 2;
  if (first >= 0xe0 && first < 0xf0) return 3;
  if (first >= 0xf0 && first < 0xf5) return LONGEST;
  return 0;
}

// The cells of bytes from `start` on: a character with all its bytes, or a single byte that belongs to none.
// `symbol` says that the text stands for something that cannot be printed.
export function cellsOf(bytes, start = 0) {
  const cells = [];
  let place = start;
  while (place < bytes.length) {
    const length = characterLength(bytes[place]);
    let character = null;
    if (length && place + length <= bytes.length) {
      try {
        character = strict.decode(bytes.subarray(place, place + length));
      } catch {
        character = null; // No UTF-8.
      }
    }
    const cell = character === null ? byteCell(bytes[place]) : characterCell(character);
    cells.push({ start: place, length: character === null ? 1 : length, ...cell });
    place += character === null ? 1 : length;
  }
  return cells;
}

function byteCell(byte) {
  return { text: `\\x${byte.toString(16).padStart(2, "0")}`, symbol: true };
}

function characterCell(character) {
  if (character === "\n") return { text: "↵\n", symbol: true };
  if (character === "\t") return { text: "→\t", symbol: true };
  if (MARK.test(character)) return { text: `◌${character}`, symbol: false };
  if (!UNPRINTABLE.test(character)) return { text: character, symbol: false };
  const code = character.codePointAt(0);
  return code < 0x80 ? byteCell(code) : { text: `U+${code.toString(16).toUpperCase().padStart(4, "0")}`, symbol: true };
}

// Where the last character may still go on: cells from here are made anew when bytes follow.
export function openEnd(bytes) {
  for (let back = 1; back < LONGEST && back <= bytes.length; back += 1) {
    const length = characterLength(bytes[bytes.length - back]);
    if (length > back) return bytes.length - back;
    if (length) break;
  }
  return bytes.length;
}

// A byte of text in a few letters.
export function letter(byte) {
  if (byte === 10) return "↵";
  if (byte === 9) return "→";
  if (byte === 32) return "␣";
  return byte > 32 && byte < 127 ? String.fromCharCode(byte) : `\\x${byte.toString(16).padStart(2, "0")}`;
}

export function letterName(byte) {
  const names = { 9: "tab", 10: "line end", 32: "space" };
  return names[byte] ?? letter(byte);
}

// 8-bit mu-law as in longstride/data/audio.py: a code stands for the middle of its interval.
export function soundOf(code) {
  const companded = (code + 0.5) / 128 - 1;
  return (Math.sign(companded) * Math.expm1(Math.abs(companded) * Math.log(256))) / 255;
}

export function codeOf(sample) {
  const x = Math.max(-1, Math.min(1, sample));
  const companded = (Math.sign(x) * Math.log1p(255 * Math.abs(x))) / Math.log(256);
  return Math.min(255, Math.floor((companded + 1) * 128));
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

export function joined(...parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    whole.set(part, place);
    place += part.length;
  }
  return whole;
}
