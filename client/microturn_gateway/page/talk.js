// The conversation: what was said, and how it is shown. Knows its list, and the log that screen readers hear.

const NUM_HEARD = 4; // in the log: what was read out is not needed any more

export class Talk {
  #exchanges = [];
  #numBegun = 0; // cleared ones too, so that each has an id of its own

  constructor(list, log) {
    this.list = list;
    this.log = log;
  }

  // The user has said something; its answers come.
  begin(question) {
    const exchange = new Exchange(String((this.#numBegun += 1)), question);
    this.#exchanges.push(exchange);
    this.list.append(exchange.element);
    return exchange;
  }

  // What was said in the session, in its order: all of it, or what came before the answer of one exchange.
  messages(end = null) {
    const place = end === null ? this.#exchanges.length : this.#exchanges.indexOf(end);
    const said = this.#exchanges.slice(0, place).flatMap(({ question, session }) => [
      { role: "user", text: question },
      ...(session.text ? [{ role: "assistant", text: session.text }] : []),
    ]);
    return end === null ? said : [...said, { role: "user", text: end.question }];
  }

  // Screen readers hear whole texts, not deltas.
  say(text) {
    this.log.append(make("p", "", text));
    while (this.log.children.length > NUM_HEARD) this.log.firstChild.remove();
  }

  clear() {
    this.#exchanges = [];
    this.list.replaceChildren();
    this.log.replaceChildren();
  }
}

class Exchange {
  askedAt = null; // by the page's clock
  firstMs = null; // from then to the first word of the session

  constructor(id, question) {
    this.id = id;
    this.question = question;
    this.element = make("li", "exchange");
    this.session = new Answer("session", "Streaming session");
    this.element.append(make("p", "user", question), this.session.element);
  }

  // The same question is asked a second time, beside the first.
  compare() {
    this.element.classList.add("compared");
    this.request = new Answer("request", "Request per turn");
    this.element.append(this.request.element);
    return this.request;
  }
}

class Answer {
  text = "";
  #text;
  #remark;

  constructor(kind, title) {
    this.element = make("section", `answer ${kind}`);
    this.#text = make("p", "text");
    this.#remark = make("p", "remark", "waiting for the first word …");
    this.element.append(make("h2", "", title), this.#text, this.#remark);
  }

  append(delta) {
    this.text += delta;
    this.#text.append(delta);
  }

  remark(text) {
    this.#remark.textContent = text;
  }

  // It ends before its end.
  cut(why) {
    this.element.classList.add("cut");
    this.remark(why);
  }
}

export function make(tag, className, text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
