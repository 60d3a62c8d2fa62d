// What went wrong in words: what happened, and what to do. Knows the codes of errors; docs/gateway.md lists them.

const WORDS = {
  context_full: "The conversation is as long as the model can hold. Begin a new one.",
  conversation_already_has_active_response: "An answer is still under way. Interrupt it, or wait for its end.",
  deadline_exceeded: "The server took too long. Ask again, or ask for a shorter answer in the settings.",
  host_not_allowed: "Without a token the gateway serves this machine only. Open the page as localhost, or start the gateway with a token.",
  invalid_api_key: "This is not the gateway’s token. Type the one that it was started with: --token-file, or MICROTURN_GATEWAY_TOKEN.",
  invalid_client_secret: "The permission to open a session had run out. The page fetches another one.",
  origin_not_allowed: "The gateway does not know this address of the page. Start it with --allow-origin and this address.",
  resource_exhausted: "The server has no room for more at the moment. Try again in a few seconds.",
  session_idle: "The session was silent for long, so the server has ended it. Reconnect to go on: the conversation is told again.",
  session_lost: "The server no longer has this session; it may have been restarted. The conversation is told to another one.",
  slow_reader: "This page did not read for a while, so the gateway closed the connection.",
  too_many_events: "More was sent than the server can take up at once. Wait a second, then go on.",
  buffer_full: "That is too much text at once. Paste it in parts of at most 65,000 characters.",
  too_many_sessions: "All places of the gateway are taken. Close another page, or try again later.",
  unavailable: "The model’s server does not answer. It may be starting; otherwise see whether it runs.",
  // The browser's own failures, which have no code of the gateway.
  unreachable: "The gateway does not answer. See whether it runs and whether this machine is online.",
  not_taken: "The gateway did not take the connection. All its places may be taken, or a proxy before it lets no WebSocket through.",
  broken: "The connection to the gateway broke: it may have been restarted.",
};

// `error` has a `code`, and the gateway's own `message` for codes that nobody has put into words here.
export function inWords({ code, message }) {
  return WORDS[code] ?? `The gateway says: ${message}.`;
}
