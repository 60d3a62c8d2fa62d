// What turns cost: the last answer, the chart, and the table of all. Knows the elements of the panel.

import { Chart } from "./chart.js";
import { make } from "./talk.js";

const NUM_KEPT = 400;
const BEAT_MS = 200;
const NAMES = { chunk: "typed chunk", session: "streaming session", request: "request per turn" };

export const inMs = (ms) => (ms === null ? "no word" : `${Math.round(ms).toLocaleString("en")} ms`);

export class Measurements {
  #points = [];
  #numChunks = 0;
  #numWithin = 0;
  #last = {}; // first word in milliseconds of the last answer, by kind

  // `at` gives an element by its id.
  constructor(at) {
    this.at = at;
    this.chart = new Chart(at("chart"));
  }

  // A chunk has landed, with the gateway's report of its turn.
  landed(report) {
    this.#numChunks += 1;
    this.#numWithin += report.latency_ms <= BEAT_MS ? 1 : 0;
    this.at("last").textContent = inMs(report.latency_ms);
    this.at("within").textContent = `${this.#numWithin} of ${this.#numChunks}`;
    const { latency_ms: ms, context_len: contextLen, computed_tokens: computed } = report;
    this.#add({ kind: "chunk", ms, contextLen, cachedLen: Math.max(0, contextLen - computed) });
  }

  // A question was asked: what the last one took is past.
  asked() {
    this.#last = {};
    for (const kind of ["session", "request"]) this.#show(kind, "–", "–");
    this.at("gain").textContent = "";
  }

  // An answer has ended: when its first word came, and of how many tokens before it how many were there already.
  answered(kind, { firstMs, promptLen, cachedLen }) {
    this.#show(kind, inMs(firstMs), `${cachedLen} of ${promptLen}`);
    this.#last[kind] = firstMs;
    const { session, request } = this.#last;
    if (session && request) {
      const times = Math.max(session, request) / Math.min(session, request);
      const by = times < 1.1 ? "at about the same time" : `${times.toFixed(1)} times ${session < request ? "sooner" : "later"}`;
      this.at("gain").textContent = `The session began ${by}.`;
    }
    if (firstMs !== null) this.#add({ kind, ms: firstMs, contextLen: promptLen, cachedLen });
  }

  // How long the context is now, and where its KV was.
  showContext({ context_len: contextLen, kv }, maxContext) {
    const count = contextLen.toLocaleString("en");
    this.at("context").textContent = maxContext ? `${count} of ${maxContext.toLocaleString("en")} tokens` : `${count} tokens`;
    this.at("room").value = maxContext ? contextLen / maxContext : 0;
    this.at("kv").textContent = kv;
  }

  showSpeed(tokensPerS) {
    this.at("speed").textContent = tokensPerS.toFixed(1);
  }

  // All that was measured, latest first.
  fillTable() {
    this.at("measured").replaceChildren(
      ...this.#points.toReversed().map(({ kind, ms, contextLen, cachedLen }) => {
        const row = make("tr", kind);
        row.append(...[NAMES[kind], Math.round(ms), contextLen, cachedLen].map((value) => make("td", "", value)));
        return row;
      }),
    );
  }

  #show(kind, firstWord, cached) {
    this.at(`first-${kind}`).textContent = firstWord;
    this.at(`cached-${kind}`).textContent = cached;
  }

  #add(point) {
    this.#points = [...this.#points, point].slice(-NUM_KEPT);
    this.chart.show(this.#points);
  }
}
