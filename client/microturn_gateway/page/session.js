// One realtime session over a WebSocket. Knows the gateway's events; knows nothing of the page.

// Fetches a client secret: the page never puts the token itself into a WebSocket.
async function fetchSecret(token) {
  const headers = { "content-type": "application/json" };
  if (token) headers.authorization = `Bearer ${token}`;
  const response = await fetch("v1/realtime/client_secrets", { method: "POST", headers, body: "{}" });
  const said = await response.json();
  if (!response.ok) throw Object.assign(new Error(said.error.message), { code: said.error.code });
  return said.value;
}

// Resolves when the session is there. `on` has a function for each type of event that is of interest, and `closed`.
export async function openSession(token, on) {
  const secret = await fetchSecret(token);
  const url = new URL("v1/realtime", document.baseURI);
  url.protocol = url.protocol.replace("http", "ws");
  const socket = new WebSocket(url, ["realtime", `openai-insecure-api-key.${secret}`]);
  socket.addEventListener("message", (message) => {
    const event = JSON.parse(message.data);
    on[event.type]?.(event);
  });
  socket.addEventListener("close", (event) => on.closed(event.reason || `code ${event.code}`));
  return new Session(socket);
}

class Session {
  #socket;

  constructor(socket) {
    this.#socket = socket;
  }

  append(text) {
    this.#send({ type: "input_text_buffer.append", text });
  }

  clear() {
    this.#send({ type: "input_text_buffer.clear" });
  }

  // Ends the message and asks for its answer; an answer that still runs is talked over.
  answer(options) {
    this.#send({ type: "input_text_buffer.commit" });
    this.#send({ type: "response.create", response: options });
  }

  interrupt() {
    this.#send({ type: "response.cancel" });
  }

  #send(event) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(event));
  }
}
