// What has been typed, sent on the beat. Knows a text and what of it has been sent; no page, no socket.

export class Typing {
  #sent = "";
  #timer = null;

  // `read` gives the text as it is now; `session` takes it; `beatMs` is the least time between two chunks.
  constructor(read, session, beatMs) {
    this.read = read;
    this.session = session;
    this.beatMs = beatMs;
  }

  // The text has changed: what is new of it goes with the next beat.
  changed() {
    this.#timer ??= setTimeout(() => this.flush(), this.beatMs);
  }

  // Sends what is new now. What was sent and has been taken back is cleared; the common beginning keeps its KV.
  flush() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const text = this.read();
    if (!text.startsWith(this.#sent)) {
      this.session.clear();
      this.#sent = "";
    }
    if (text.length > this.#sent.length) this.session.append(text.slice(this.#sent.length));
    this.#sent = text;
  }

  // The message has ended; the next one begins.
  reset() {
    this.#sent = "";
  }
}
