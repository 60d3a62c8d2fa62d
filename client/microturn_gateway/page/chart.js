// Latency against context length as an SVG. Knows points and an element; colours are the style sheet's.

import { marks, robustMost } from "./scale.js";

const BEAT_MS = 200;
const LEAST_CONTEXT = 100;
const MARGIN = { top: 20, right: 18, bottom: 32, left: 44 };
const SIZE = { chunk: 2, session: 4, request: 4.5 }; // of a point, in CSS pixels, by kind; the last is drawn on top

export class Chart {
  #points = [];

  constructor(svg) {
    this.svg = svg;
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  // Of each point `kind`, `ms` and `contextLen`.
  show(points) {
    this.#points = points;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.svg;
    if (!width) return;
    const ofKind = (kind) => this.#points.filter((point) => point.kind === kind);
    const kinds = Object.keys(SIZE);
    const most = robustMost(kinds.map((kind) => ofKind(kind).map(({ ms }) => ms)), 1.25 * BEAT_MS);
    const msMarks = marks(most);
    const lenMarks = marks(Math.max(LEAST_CONTEXT, ...this.#points.map(({ contextLen }) => contextLen)));
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const x = (len) => MARGIN.left + (len / lenMarks.at(-1)) * (right - MARGIN.left);
    const y = (ms) => bottom - (Math.min(ms, msMarks.at(-1)) / msMarks.at(-1)) * (bottom - MARGIN.top);

    this.svg.replaceChildren(
      ...msMarks.map((ms) => draw("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(ms), y2: y(ms) })),
      ...msMarks.map((ms) => label(ms.toLocaleString("en"), MARGIN.left - 6, y(ms) + 4, "end")),
      label("ms", MARGIN.left - 6, 11, "end"),
      ...lenMarks.map((len) => label(len.toLocaleString("en"), x(len), bottom + 14, "middle")),
      label("tokens of context", right, height - 4, "end"),
      draw("line", { class: "beat", x1: MARGIN.left, x2: right, y1: y(BEAT_MS), y2: y(BEAT_MS) }),
      ...kinds.filter((kind) => kind !== "chunk").map((kind) => draw("polyline", {
        class: kind,
        points: ofKind(kind).toSorted((one, other) => one.contextLen - other.contextLen)
          .map(({ contextLen, ms }) => `${x(contextLen)},${y(ms)}`).join(" "),
      })),
      ...kinds.flatMap(ofKind).map(({ kind, ms, contextLen }) =>
        point(ms > msMarks.at(-1) ? "beyond" : "within", kind, x(contextLen), y(ms), `${Math.round(ms)} ms at ${contextLen} tokens`)),
    );
    this.svg.ariaLabel = this.#described(ofKind, msMarks.at(-1));
  }

  #described(ofKind, endMs) {
    const last = (kind, name) => {
      const found = ofKind(kind).at(-1);
      return found ? `${name}: the last took ${Math.round(found.ms)} ms at ${found.contextLen} tokens. ` : "";
    };
    const numBeyond = this.#points.filter(({ ms }) => ms > endMs).length;
    return (
      "Latency against the length of the context. " +
      last("session", "First word of the streaming session") +
      last("request", "First word of a request per turn") +
      last("chunk", "Typed chunk") +
      (numBeyond ? `${numBeyond} beyond the scale. ` : "") +
      "All are in the table."
    );
  }
}

function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function label(text, x, y, anchor) {
  const element = draw("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

// What lies beyond the scale is an arrow at its end.
function point(place, kind, x, y, title) {
  const size = SIZE[kind];
  const paths = {
    beyond: `M${x - 5} ${y + 3}L${x} ${y - 7}L${x + 5} ${y + 3}Z`,
    request: `M${x} ${y - size}L${x + size} ${y}L${x} ${y + size}L${x - size} ${y}Z`,
  };
  const path = place === "beyond" ? paths.beyond : paths[kind];
  const named = { class: `${kind} ${place}` };
  const element = path ? draw("path", { ...named, d: path }) : draw("circle", { ...named, cx: x, cy: y, r: size });
  element.append(draw("title", {}));
  element.firstChild.textContent = title;
  return element;
}
