// How answers are made, in a dialog. Knows its form.

export class Settings {
  // `changed` gets whether the system prompt is another one than before.
  constructor(dialog, changed) {
    this.form = dialog.querySelector("form");
    this.#apply();
    dialog.addEventListener("close", () => {
      const { instructions } = this;
      if (dialog.returnValue !== "apply") return this.#fill();
      this.#apply();
      changed(this.instructions !== instructions);
    });
  }

  // As `/v1/responses` takes it; a session has `temperature` and `top_p` under `microturn`.
  get options() {
    const { temperature, topP, maxTokens } = this.values;
    return { temperature: Number(temperature), top_p: Number(topP), max_output_tokens: Number(maxTokens) };
  }

  get session() {
    const { max_output_tokens, ...microturn } = this.options;
    return { instructions: this.instructions, max_output_tokens, microturn };
  }

  get instructions() {
    return this.values.instructions;
  }

  get compares() {
    return this.values.compare === "on";
  }

  #apply() {
    this.values = Object.fromEntries(new FormData(this.form));
  }

  #fill() {
    for (const { name, type } of this.form.elements) {
      if (type === "checkbox") this.form.elements[name].checked = name in this.values;
      else if (name) this.form.elements[name].value = this.values[name];
    }
  }
}
