// Small helpers of the stage: elements, fitted text, colours, token texts. Text from a trace is only ever set with textContent.
const SVG_NS = "http://www.w3.org/2000/svg";
const REQUEST_COLOURS = 7; // --r0 … --r6 in stage.css

function svg(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG_NS, tag);
  setAttributes(element, attributes);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function html(parent, tag, attributes, text) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function setAttributes(element, attributes) {
  for (const name in attributes || {}) {
    const value = attributes[name];
    if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value);
  }
  return element;
}

// A tooltip of an SVG element; HTML elements have the title attribute.
function hint(element, text) {
  let title = element.querySelector(":scope > title");
  if (!title) {
    title = document.createElementNS(SVG_NS, "title");
    element.prepend(title);
  }
  if (title.textContent !== text) title.textContent = text;
}

// The inner size of an element, asked for once and again after `forgetSizes`: asking while a frame is being drawn would make the browser lay out half a page.
let sizes = new WeakMap();

function sizeOf(element) {
  let size = sizes.get(element);
  if (!size) sizes.set(element, (size = { width: element.clientWidth, height: element.clientHeight }));
  return size;
}

function forgetSizes() {
  sizes = new WeakMap();
}

const measure = (() => {
  const known = new Map();
  let context = null;
  return (text, font) => {
    const key = font + "|" + text;
    let width = known.get(key);
    if (width === undefined) {
      context = context || document.createElement("canvas").getContext("2d");
      context.font = font;
      width = context.measureText(text).width;
      if (known.size > 20000) known.clear();
      known.set(key, width);
    }
    return width;
  };
})();

// The longest beginning of `text` that fits into `width` pixels, with an ellipsis where something is left out.
function fitText(text, width, size, weight) {
  const font = `${weight || 500} ${size}px ${fontFamily}`;
  if (measure(text, font) <= width) return text;
  const letters = Array.from(text);
  let low = 0;
  let high = letters.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (measure(letters.slice(0, middle).join("") + "…", font) <= width) low = middle;
    else high = middle - 1;
  }
  return letters.slice(0, low).join("") + "…";
}

// Lines for a narrow slot: a slightly long word is squeezed, a longer one is broken over up to `lines` lines, and only then cut.
const SQUEEZE = 1.35;

function wrapToken(text, width, size, weight, lines) {
  const font = `${weight} ${size}px ${fontFamily}`;
  const limit = width * SQUEEZE;
  const result = [];
  let rest = Array.from(text);
  while (rest.length && result.length < lines) {
    if (measure(rest.join(""), font) <= limit) {
      result.push(rest.join(""));
      return result;
    }
    let end = 1;
    while (end < rest.length && measure(rest.slice(0, end + 1).join("") + "-", font) <= width * 1.12) end += 1;
    if (rest.length - end === 1 && end > 2) end -= 1; // no single letter on a line of its own
    result.push(rest.slice(0, end).join("") + "-");
    rest = rest.slice(end);
  }
  if (rest.length) result[result.length - 1] = result[result.length - 1].slice(0, -1) + "…";
  return result;
}

// Whole words on as many lines as they need.
function wrapWords(text, width, size) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines[lines.length - 1] ? `${lines[lines.length - 1]} ${word}` : word;
    if (measure(longer, `500 ${size}px ${fontFamily}`) <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

let fontFamily = "system-ui, sans-serif";

function useFontOf(element) {
  fontFamily = getComputedStyle(element).fontFamily || fontFamily;
}

// Blanks and line breaks of a token made visible, as in the narration.
function visible(text) {
  const stripped = text.replace(/^ +| +$/g, "");
  if (!stripped) return text ? "␣".repeat(text.length) : "∅";
  return stripped.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

function plural(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

// The colour and the letter of a request; both go together everywhere, so that nothing is told by colour alone.
function requestColour(recording, requestId) {
  const index = recording.requestOrder.indexOf(requestId);
  return index < 0 ? "var(--mute)" : `var(--r${index % REQUEST_COLOURS})`;
}

function requestLetter(requestId) {
  return requestId.length <= 2 || /^\p{L}\d\d$/u.test(requestId) ? requestId : requestId[0].toUpperCase(); // A10 is the tenth sequence of group A
}

function isDark(colour) {
  const parts = /^#([0-9a-f]{6})/i.exec(colour)
    ? [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16))
    : (colour.match(/[\d.]+/g) || []).slice(0, 3).map(Number);
  if (parts.length < 3) return matchMedia("(prefers-color-scheme: dark)").matches;
  return 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2] < 128;
}
