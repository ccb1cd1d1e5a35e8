// Text and elements. Data is set only as textContent, so markup in it is never parsed.

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const byId = (id) => document.getElementById(id);
const count = (number) => Number(number).toLocaleString("en-US");
const percent = (part, whole, digits = 0) => (whole ? `${((100 * part) / whole).toFixed(digits)}%` : "–");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const baseName = (path) => (path ? path.slice(path.lastIndexOf("/") + 1) : "?");

// Show control characters and direction marks as visible text.
const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
function harmless(text) {
  return text.replace(STEERING, (one) => {
    const code = one.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "␡" : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const lenient = new TextDecoder("utf-8", { ignoreBOM: true });

function whole(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return null;
  }
}

function joined(parts) {
  let size = 0;
  for (const part of parts) size += part.length;
  const all = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");
const fromHex = (text) => Uint8Array.from({ length: text.length / 2 }, (_, n) => parseInt(text.substr(2 * n, 2), 16));

// The number of bytes at the end that start an incomplete character.
function unfinished(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if (byte < 0x80) return 0;
    if (byte >= 0xc0) return (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) > back ? back : 0;
  }
  return 0;
}

// The text of each token: the characters that it completes. The last of several tokens of a character
// shows it; the others show nothing (null).
function shownTexts(row) {
  const texts = new Array(row.ids.length);
  const known = new Map();
  let begun = new Uint8Array(0);
  for (let at = 0; at < row.ids.length; at++) {
    const id = row.ids[at];
    if (!begun.length) {
      let text = known.get(id);
      if (text === undefined) known.set(id, (text = whole(row.piece(id))));
      if (text !== null) {
        texts[at] = text;
        continue;
      }
    }
    const bytes = joined([begun, row.piece(id)]);
    const left = at + 1 < row.ids.length ? unfinished(bytes) : 0;
    const text = lenient.decode(bytes.subarray(0, bytes.length - left));
    begun = bytes.slice(bytes.length - left);
    texts[at] = text === "" && left ? null : text;
  }
  return texts;
}
