// Speech instead of typing, where the browser recognizes speech by itself. Knows a button and a text field.

const Recognition = globalThis.SpeechRecognition ?? globalThis.webkitSpeechRecognition;

const WORDS = {
  "not-allowed": "The browser may not use the microphone here. Allow it in the browser’s settings of this page.",
  "service-not-allowed": "The browser allows no speech recognition here. Type instead.",
  "audio-capture": "There is no microphone. Connect one, or type instead.",
  "network": "The browser’s speech recognition cannot reach its service. Type instead, or try again later.",
  "language-not-supported": "The browser’s speech recognition does not know this language. Type instead.",
  "no-speech": "Nothing was heard. Press the button and speak again.",
};

export class Microphone {
  #recognition = null; // while it listens

  // `changed` is called when the field's text is another one, `failed` with words.
  constructor(button, field, { changed, failed }) {
    this.button = button;
    this.field = field;
    this.changed = changed;
    this.failed = failed;
    button.hidden = Recognition === undefined;
    button.addEventListener("click", () => (this.#recognition ? this.#recognition.stop() : this.#listen()));
  }

  // Hears nothing more.
  stop() {
    this.#recognition?.abort();
    this.#show(null);
  }

  #listen() {
    const recognition = new Recognition();
    const before = this.field.value && `${this.field.value.trimEnd()} `;
    const isCurrent = () => this.#recognition === recognition;
    Object.assign(recognition, { continuous: true, interimResults: true, lang: navigator.language });
    recognition.addEventListener("result", ({ results }) => {
      if (!isCurrent()) return;
      this.field.value = before + Array.from(results, ([likeliest]) => likeliest.transcript).join("");
      this.changed();
    });
    recognition.addEventListener("error", ({ error }) => {
      if (error !== "aborted") this.failed(WORDS[error] ?? `The browser’s speech recognition failed (${error}). Type instead.`);
    });
    recognition.addEventListener("end", () => isCurrent() && this.#show(null));
    this.#show(recognition);
    recognition.start();
  }

  #show(recognition) {
    this.#recognition = recognition;
    this.button.ariaPressed = String(recognition !== null);
  }
}
