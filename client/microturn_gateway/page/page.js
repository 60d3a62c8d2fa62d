// The page: what is typed or spoken goes to the session, what the session says is shown, and compared.

import { Connection } from "./connection.js";
import { inWords } from "./errors.js";
import { inMs, Measurements } from "./measurements.js";
import { Microphone } from "./microphone.js";
import { requestPerTurn } from "./request.js";
import { APPEND } from "./session.js";
import { Settings } from "./settings.js";
import { Talk } from "./talk.js";
import { Typing } from "./typing.js";

const LATE_MS = 200;
const NOT_SENT = "not sent, since the other answer did not come to its end";

const at = (id) => document.getElementById(id);
const input = at("input");
const talk = new Talk(at("messages"), at("heard"));
const measurements = new Measurements(at);
let about = null; // what the gateway said of the session
let typing = null; // while there is a session
let asked = []; // exchanges whose answer is under way, the last one last
let comparison = null; // stops the request that runs for comparison
const answering = new Map(); // exchanges by the id of their response

const connection = new Connection(prepare, {
  opened() {
    typing = new Typing(() => input.value, connection.session, about.beat_ms);
    if (input.value) typing.changed();
    const needsFocus = input.disabled || document.activeElement === at("reconnect"); // which goes now
    input.disabled = at("send").disabled = false;
    if (needsFocus) input.focus();
    trouble(null);
    showState();
  },

  lost(failure, isTriedAgain) {
    leave("the connection was lost");
    if (failure.code === "invalid_api_key") askForToken(failure);
    else trouble(inWords(failure) + (isTriedAgain ? " Trying again …" : ""), true);
    if (!isTriedAgain) at("state").textContent = "not connected";
  },

  silent: () => trouble("The model’s server has been silent for a while. It may be busy or starting; nothing is lost."),
  heard: () => trouble(null),

  "input_text_buffer.appended"({ text, microturn }) {
    const chunk = document.createElement("span");
    chunk.textContent = text;
    chunk.title = `${microturn.latency_ms} ms, ${microturn.input_tokens} tokens`;
    chunk.classList.toggle("late", microturn.latency_ms > LATE_MS);
    at("landed").append(chunk);
    measurements.landed(microturn);
    measurements.showContext(microturn, about.max_context);
  },

  "input_text_buffer.cleared": () => at("landed").replaceChildren(),
  "input_text_buffer.committed": () => at("landed").replaceChildren(),

  "response.created"({ response: { id, metadata } }) {
    answering.set(id, asked.find((exchange) => exchange.id === metadata.exchange));
  },

  "response.output_text.delta"({ response_id: id, delta }) {
    const exchange = answering.get(id);
    exchange.firstMs ??= performance.now() - exchange.askedAt;
    follow(() => exchange.session.append(delta));
  },

  "response.done"({ response }) {
    const exchange = answering.get(response.id);
    answering.delete(response.id);
    asked = asked.filter((other) => other !== exchange);
    showState();
    answered(exchange, response);
  },

  error({ error }) {
    // An interrupt that came when the answer had just ended is none.
    if (error.code === "response_cancel_not_active") return;
    if (error.event_id === APPEND) typing?.takeBack();
    giveUp(asked.filter(({ id }) => id === error.event_id), inWords(error));
    trouble(inWords(error));
  },
});

const settings = new Settings(at("settings"), (isOtherPrompt) => {
  // With another beginning nothing of the context stays: another session is told the conversation.
  if (isOtherPrompt) reopen();
  else connection.session?.update(settings.session);
});

const microphone = new Microphone(at("microphone"), input, { changed: () => typing?.changed(), failed: trouble });

async function prepare(session, { session: told }) {
  about = told.microturn;
  at("model").textContent = told.model;
  session.update(settings.session);
  for (const message of talk.messages()) await session.tell(message);
}

// Another session goes on with the conversation.
function reopen() {
  comparison?.abort();
  connection.open();
  leave("another session goes on");
}

// The session is gone, and with it what was under way there.
function leave(why) {
  typing?.stop();
  typing = null;
  at("landed").replaceChildren();
  answering.clear();
  at("send").disabled = true;
  giveUp(asked, why);
}

// These exchanges get no answer any more.
function giveUp(exchanges, why) {
  for (const { session, request } of exchanges) {
    session.cut(why);
    request?.cut(NOT_SENT);
  }
  asked = asked.filter((exchange) => !exchanges.includes(exchange));
  showState();
}

function showState() {
  at("interrupt").disabled = asked.length === 0 && comparison === null;
  const state = asked.length > 0 ? "answering" : comparison ? "comparing" : "ready";
  at("state").textContent = connection.session === null ? "connecting" : state;
}

// What is wrong, and whether reconnecting may help; null for nothing.
function trouble(words, canReconnect = false) {
  at("trouble").hidden = words === null;
  at("reconnect").hidden = !canReconnect;
  at("trouble-words").textContent = words ?? "";
}

function askForToken(failure) {
  at("door-words").textContent = connection.token ? inWords(failure) : "";
  at("door").showModal();
}

// Does something that makes the conversation longer; whoever reads at its end stays there.
function follow(change) {
  const view = at("talk");
  const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 40;
  change();
  if (isAtEnd) view.scrollTop = view.scrollHeight;
}

function ask() {
  const text = input.value;
  const { session } = connection;
  if (!session || !text.trim()) return;
  trouble(null);
  microphone.stop();
  interrupt();
  at("hint").hidden = true;
  const exchange = talk.begin(text);
  if (settings.compares) exchange.compare().remark("waits for the other answer, so that neither slows the other");
  at("talk").scrollTop = at("talk").scrollHeight;
  asked.push(exchange);
  measurements.asked();
  exchange.askedAt = performance.now();
  typing.flush();
  session.answer(exchange.id);
  input.value = "";
  typing.reset();
  showState();
}

function interrupt() {
  if (asked.length > 0) connection.session.interrupt();
  comparison?.abort();
}

function answered(exchange, { status, status_details: details, usage, microturn }) {
  const { session: answer, request, firstMs } = exchange;
  const isWhole = status !== "cancelled" && status !== "failed";
  if (status === "failed") {
    answer.cut(inWords(details.error));
    trouble(inWords(details.error));
  } else if (microturn) {
    const cost = { firstMs, promptLen: usage.input_tokens, cachedLen: usage.input_token_details.cached_tokens };
    measurements.answered("session", cost);
    measurements.showContext(microturn, about.max_context);
    measurements.showSpeed(usage.output_tokens / (microturn.latency_ms / 1e3));
    if (isWhole) answer.remark(inShort(cost));
    else answer.cut(`interrupted · ${inShort(cost)}`);
    talk.say(`${answer.text} (${isWhole ? "" : "interrupted; "}${inShort(cost)})`);
  } else {
    answer.cut("interrupted before it began");
  }
  if (request && isWhole) compare(exchange);
  else request?.cut(NOT_SENT);
}

const inShort = ({ firstMs, promptLen, cachedLen }) =>
  `first word after ${inMs(firstMs)} with ${cachedLen} of ${promptLen} tokens already there`;

async function compare(exchange) {
  const stop = (comparison = new AbortController());
  const { request: answer } = exchange;
  answer.remark("waiting for the first word …");
  showState();
  try {
    const cost = await requestPerTurn({
      token: connection.token,
      instructions: settings.instructions,
      messages: talk.messages(exchange),
      options: settings.options,
      signal: stop.signal,
      onText: (delta) => follow(() => answer.append(delta)),
    });
    measurements.answered("request", cost);
    follow(() => answer.remark(inShort(cost)));
    talk.say(`The same as a request per turn: ${inShort(cost)}`);
  } catch (failure) {
    answer.cut(stop.signal.aborted ? "stopped" : inWords(failure));
  }
  if (comparison === stop) comparison = null;
  showState();
}

input.addEventListener("input", () => typing?.changed());
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) interrupt();
});
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
at("interrupt").addEventListener("click", () => {
  interrupt();
  input.focus();
});
at("reconnect").addEventListener("click", reopen);
at("new").addEventListener("click", () => {
  talk.clear();
  at("hint").hidden = false;
  reopen();
  input.focus();
});
at("open-settings").addEventListener("click", () => at("settings").showModal());
at("open-table").addEventListener("click", () => {
  measurements.fillTable();
  at("table").showModal();
});
at("door").addEventListener("close", () => {
  connection.token = at("token").value;
  at("token").value = "";
  connection.open();
});
new ResizeObserver(() => {
  if (at("hint").hidden) at("talk").scrollTop = at("talk").scrollHeight;
}).observe(at("talk"));
connection.open();
