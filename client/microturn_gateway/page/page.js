// The page: what is typed goes to the session, what the session says is shown.

import { StripChart } from "./chart.js";
import { openSession } from "./session.js";
import { Typing } from "./typing.js";

const at = (id) => document.getElementById(id);
const chart = new StripChart(at("chart"));
const input = at("input");
let session = null;
let typing = null;
let current = null; // id of the response that was asked for last, until it is done
const answers = new Map(); // of responses that are not done: their elements, by id
let maxContext = null;

function say(role, text) {
  at("hint").hidden = true;
  const message = document.createElement("li");
  message.className = role;
  message.textContent = text;
  at("messages").append(message);
  scroll();
  return message;
}

function scroll() {
  at("talk").scrollTop = at("talk").scrollHeight;
}

function setState(text, isWrong = false) {
  at("state").textContent = text;
  at("state").classList.toggle("wrong", isWrong);
}

function setCurrent(id) {
  current = id;
  at("interrupt").disabled = id === null;
  setState(id === null ? "ready" : "answering");
}

function showContext({ context_len: length, kv }) {
  at("context").textContent = maxContext ? `${length} of ${maxContext} tokens` : `${length} tokens`;
  at("room").value = maxContext ? length / maxContext : 0;
  at("kv").textContent = kv;
}

const on = {
  "session.created"({ session: told }) {
    maxContext = told.microturn.max_context;
    at("model").textContent = told.model;
    typing = new Typing(() => input.value, session, told.microturn.beat_ms);
    input.disabled = at("send").disabled = false;
    input.focus();
    setState("ready");
  },

  "input_text_buffer.appended"({ text, microturn }) {
    const chunk = document.createElement("span");
    chunk.textContent = text;
    chunk.title = `${microturn.latency_ms} ms, ${microturn.input_tokens} tokens`;
    chunk.classList.toggle("late", microturn.latency_ms > 200);
    at("landed").append(chunk);
    at("last").textContent = `${Math.round(microturn.latency_ms)} ms`;
    chart.add(microturn.latency_ms, "typed");
    at("within").textContent = chart.summary;
    showContext(microturn);
  },

  "input_text_buffer.cleared"() {
    at("landed").replaceChildren();
  },

  "input_text_buffer.committed"() {
    at("landed").replaceChildren();
  },

  "response.created"({ response }) {
    setCurrent(response.id);
  },

  "response.output_text.delta"({ response_id: id, delta }) {
    if (!answers.has(id)) answers.set(id, say("assistant", ""));
    answers.get(id).append(delta);
    scroll();
  },

  "response.done"({ response }) {
    const { id, microturn, status, usage } = response;
    if (status === "cancelled") answers.get(id)?.classList.add("cut");
    if (status === "failed") say("note", response.status_details.error.message);
    if (microturn) {
      showContext(microturn);
      const numTokens = usage.output_tokens;
      at("speed").textContent = (numTokens / (microturn.latency_ms / 1e3)).toFixed(1);
      if (microturn.first_text_ms !== null) chart.add(microturn.first_text_ms, "first");
      at("within").textContent = chart.summary;
    }
    answers.delete(id);
    if (id === current) setCurrent(null);
  },

  error({ error }) {
    // An interrupt that came when the answer had just ended is none.
    if (error.code !== "response_cancel_not_active") say("note", error.message);
  },

  closed(reason) {
    session = null;
    input.disabled = at("send").disabled = at("interrupt").disabled = true;
    setState(`closed: ${reason}. Reload to begin anew.`, true);
  },
};

async function connect(token) {
  try {
    session = await openSession(token, on);
  } catch (error) {
    if (error.code === "invalid_api_key") {
      at("door").showModal();
    } else {
      setState(error.message, true);
    }
  }
}

function ask() {
  const text = input.value;
  if (!session || !text.trim()) return;
  if (current !== null) session.interrupt();
  typing.flush();
  say("user", text);
  session.answer({});
  input.value = "";
  typing.reset();
}

function interrupt() {
  if (session && current !== null) session.interrupt();
  input.focus();
}

input.addEventListener("input", () => typing.changed());
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("door").open) interrupt();
});
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
at("interrupt").addEventListener("click", interrupt);
at("door").addEventListener("close", () => {
  const token = at("token").value;
  at("token").value = "";
  connect(token);
});
new ResizeObserver(scroll).observe(at("talk"));
connect("");
