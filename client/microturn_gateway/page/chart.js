// A strip chart of turn latencies against the 200 ms line. Knows numbers and a canvas.

const LINE_MS = 200;
const NUM_SHOWN = 60;

export class StripChart {
  #turns = [];
  #numWithin = 0;
  #numTurns = 0;

  constructor(canvas) {
    this.canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // `kind` is "typed" for a chunk, "first" for the first word of an answer.
  add(ms, kind) {
    this.#turns = [...this.#turns, { ms, kind }].slice(-NUM_SHOWN);
    this.#numTurns += 1;
    this.#numWithin += ms <= LINE_MS ? 1 : 0;
    this.draw();
  }

  get summary() {
    return `${this.#numWithin} of ${this.#numTurns}`;
  }

  draw() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const colour = (name) => getComputedStyle(canvas).getPropertyValue(name);
    const most = Math.max(LINE_MS * 1.25, ...this.#turns.map((turn) => turn.ms));
    const y = (ms) => height - 2 - (ms / most) * (height - 14);
    const step = width / NUM_SHOWN;
    this.#turns.forEach(({ ms, kind }, index) => {
      const x = width - (this.#turns.length - index) * step;
      pen.fillStyle = colour(ms > LINE_MS ? "--late" : kind === "first" ? "--first" : "--accent");
      if (kind === "first") {
        pen.beginPath();
        pen.arc(x + step / 2, y(ms), Math.max(2.5, step * 0.45), 0, 2 * Math.PI);
        pen.fill();
      } else {
        pen.fillRect(x, y(ms), Math.max(1.5, step - 1.5), height - y(ms));
      }
    });
    pen.strokeStyle = pen.fillStyle = colour("--soft");
    pen.setLineDash([4, 3]);
    pen.beginPath();
    pen.moveTo(0, y(LINE_MS));
    pen.lineTo(width, y(LINE_MS));
    pen.stroke();
    pen.font = "11px system-ui, sans-serif";
    pen.fillText(`${LINE_MS} ms`, 0, y(LINE_MS) - 4);
    const last = this.#turns.at(-1);
    canvas.ariaLabel = last
      ? `Latency of the last ${this.#turns.length} turns; ${this.summary} within ${LINE_MS} ms, the last took ${Math.round(last.ms)} ms`
      : "No turns yet";
  }
}
