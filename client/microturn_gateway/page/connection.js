// Keeps a session open: opens another one where it is lost, and brings it to where the conversation was.

import { Failure, openSession } from "./session.js";

const FIRST_WAIT_S = 1;
const MOST_WAIT_S = 15;
// Trying again by itself would change nothing, or hold a place that nobody uses.
const FINAL = ["session_idle", "context_full", "host_not_allowed", "origin_not_allowed", "invalid_api_key"];

export class Connection {
  session = null; // while it is ready
  #opening = null;
  #waitS = FIRST_WAIT_S;
  #timer = null;
  #number = 0; // of the attempt: what an earlier one still says is not heard

  // `prepare` gets a new session and the event that told of it, and resolves when it can be used;
  // `on` has the session's events, `opened`, and `lost`, which gets a `Failure` and whether it is tried again.
  constructor(prepare, on) {
    this.prepare = prepare;
    this.on = on;
    this.token = "";
  }

  // Opens a session in place of the one that there may be.
  async open() {
    clearTimeout(this.#timer);
    this.#leave();
    const number = (this.#number += 1);
    const isCurrent = () => number === this.#number;
    try {
      const created = Promise.withResolvers();
      const on = { ...this.on, "session.created": created.resolve, closed: (failure) => {
        created.reject(failure);
        if (isCurrent() && this.session) this.#lost(failure);
      } };
      const session = await openSession(this.token, on);
      if (!isCurrent()) return session.close();
      this.#opening = session;
      await this.prepare(session, await created.promise);
      if (!isCurrent()) return;
      this.session = session;
      this.#waitS = FIRST_WAIT_S;
      this.on.opened();
    } catch (failure) {
      if (!(failure instanceof Failure)) throw failure;
      if (isCurrent()) this.#lost(failure);
    }
  }

  #lost(failure) {
    this.#leave();
    const again = !FINAL.includes(failure.code);
    if (again) this.#timer = setTimeout(() => this.open(), this.#waitS * 1e3);
    this.#waitS = Math.min(2 * this.#waitS, MOST_WAIT_S);
    this.on.lost(failure, again);
  }

  #leave() {
    this.#opening?.close();
    this.#opening = this.session = null;
  }
}
