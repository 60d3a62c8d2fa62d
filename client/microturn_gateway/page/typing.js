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
    this.stop();
    const text = this.read();
    if (!text.startsWith(this.#sent)) this.takeBack();
    if (text.length > this.#sent.length) this.session.append(text.slice(this.#sent.length));
    this.#sent = text;
  }

  // Nothing of the message is on the server any more: what is there of it goes again with the next change.
  takeBack() {
    this.session.clear();
    this.#sent = "";
  }

  // The message has ended; the next one begins.
  reset() {
    this.#sent = "";
  }

  // Sends nothing by itself any more.
  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }
}
