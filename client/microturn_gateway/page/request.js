// The same question as a request per turn: the whole conversation is sent, answered, and nothing of it kept.

import { ask, Failure } from "./session.js";

// Answers `messages`. `onText` gets the text as it comes; the result says what it cost.
export async function requestPerTurn({ token, instructions, messages, options, signal, onText }) {
  const input = messages.map(({ role, text }) => ({ role, content: text }));
  const body = { input, instructions: instructions || undefined, stream: true, store: false, ...options };
  const begunAt = performance.now();
  const response = await ask("v1/responses", token, body, signal);
  let firstMs = null;
  for await (const event of events(response.body)) {
    if (event.type === "response.output_text.delta") {
      firstMs ??= performance.now() - begunAt;
      onText(event.delta);
    } else if (event.type === "response.failed") {
      throw new Failure(event.response.error.code, event.response.error.message);
    } else if (event.response?.usage) {
      const { input_tokens: promptLen, input_tokens_details: details } = event.response.usage;
      return { firstMs, promptLen, cachedLen: details.cached_tokens };
    }
  }
  throw new Failure("broken");
}

// The events of a stream of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(() => ({ done: true }));
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((line) => line.startsWith("data: "));
      if (line) yield JSON.parse(line.slice("data: ".length));
    }
  }
}
