// One realtime session over a WebSocket. Knows the gateway's events; knows nothing of the page.

// What `error.event_id` is where text could not be appended.
export const APPEND = "append";

// What is sent is answered sooner, unless the gateway waits for its server.
const SILENCE_MS = 3000;

export class Failure extends Error {
  constructor(code, message = code) {
    super(message);
    this.code = code;
  }
}

// Asks the gateway; what it refuses, and that it cannot be reached, is a `Failure`.
export async function ask(path, token, body, signal) {
  const headers = { "content-type": "application/json" };
  if (token) headers.authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("unreachable");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null); // a proxy's own words are no JSON
  throw said ? new Failure(said.error.code, said.error.message) : new Failure("unreachable");
}

// `on` has a function for each type of event that is of interest; `silent` and `heard`, for when nothing comes for long
// and when something comes again; and `closed`, which gets a `Failure`.
// The page never puts the token itself into a WebSocket: it fetches a client secret.
export async function openSession(token, on) {
  const response = await ask("v1/realtime/client_secrets", token, {});
  const { value: secret } = await response.json();
  const url = new URL("v1/realtime", document.baseURI);
  url.protocol = url.protocol.replace("http", "ws");
  return new Session(new WebSocket(url, ["realtime", `openai-insecure-api-key.${secret}`]), on);
}

class Session {
  #socket;
  #on;
  #wasOpen = false;
  #numTold = 0;
  #told = new Map(); // items that are not confirmed: what to call, by id
  #silence = null; // since something was sent
  #isSilent = false;

  constructor(socket, on) {
    this.#socket = socket;
    this.#on = on;
    socket.addEventListener("open", () => (this.#wasOpen = true));
    socket.addEventListener("message", (message) => this.#receive(JSON.parse(message.data)));
    socket.addEventListener("close", (event) => this.#closed(event.reason));
  }

  update(session) {
    this.#send({ type: "session.update", session: { type: "realtime", ...session } });
  }

  append(text) {
    this.#send({ type: "input_text_buffer.append", event_id: APPEND, text });
  }

  clear() {
    this.#send({ type: "input_text_buffer.clear" });
  }

  // A message that was said before. Resolves when the server's context holds it.
  tell({ role, text }) {
    const id = `told_${(this.#numTold += 1)}`;
    const content = [{ type: role === "user" ? "input_text" : "output_text", text }];
    const item = { id, type: "message", role, content };
    return new Promise((resolve, reject) => {
      this.#told.set(id, { resolve, reject });
      this.#send({ type: "conversation.item.create", event_id: id, item });
    });
  }

  // Ends the message and asks for its answer; its response has the exchange's id in its metadata, a refusal in its `event_id`.
  answer(exchange) {
    this.#send({ type: "input_text_buffer.commit" });
    this.#send({ type: "response.create", event_id: exchange, response: { metadata: { exchange } } });
  }

  interrupt() {
    this.#send({ type: "response.cancel" });
  }

  // Leaves it: nothing more is heard of it.
  close() {
    this.#on = {};
    clearTimeout(this.#silence);
    this.#socket.close();
    this.#giveUp(new Failure("broken"));
  }

  #send(event) {
    if (this.#socket.readyState !== WebSocket.OPEN) return;
    this.#socket.send(JSON.stringify(event));
    this.#silence ??= setTimeout(() => {
      this.#isSilent = true;
      this.#on.silent?.();
    }, SILENCE_MS);
  }

  #hear() {
    clearTimeout(this.#silence);
    this.#silence = null;
    if (this.#isSilent) this.#on.heard?.();
    this.#isSilent = false;
  }

  #receive(event) {
    this.#hear();
    if (event.type === "conversation.item.done") this.#taken(event.item.id)?.resolve();
    const refused = event.type === "error" ? this.#taken(event.error.event_id) : undefined;
    if (refused) refused.reject(new Failure(event.error.code, event.error.message));
    else this.#on[event.type]?.(event);
  }

  #taken(id) {
    const told = this.#told.get(id);
    this.#told.delete(id);
    return told;
  }

  #closed(reason) {
    clearTimeout(this.#silence);
    const failure = new Failure(reason || (this.#wasOpen ? "broken" : "not_taken"));
    this.#giveUp(failure);
    this.#on.closed?.(failure);
  }

  #giveUp(failure) {
    for (const { reject } of this.#told.values()) reject(failure);
    this.#told.clear();
  }
}
