// What the reader has set. Kept by the browser; the key only until the tab is closed.

const STORE = "dominotree.settings";
const KEY_STORE = "dominotree.key";
const DEFAULTS = {
  method: "",
  budget: "",
  temperature: "0",
  top_p: "1",
  seed: "",
  max_tokens: "512",
  system: "",
  theme: "",
};

/** The form of the settings, and what it says. */
export class Settings {
  /** `dialog` holds a form with a field for each setting; `onChange` is told when it closes. */
  constructor(dialog, onChange) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    this.can = null;
    this.write({ ...DEFAULTS, ...read(localStorage, STORE), key: read(sessionStorage, KEY_STORE).key ?? "" });
    this.form.addEventListener("submit", (event) => {
      if (event.submitter?.value === "reset") {
        event.preventDefault();
        this.write({ ...DEFAULTS, key: "" });
        if (this.can) this.offer(this.can);
      }
    });
    this.form.addEventListener("input", () => this.adapt());
    dialog.addEventListener("close", () => {
      this.save();
      onChange();
    });
    this.applyTheme();
  }

  get values() {
    return Object.fromEntries(new FormData(this.form));
  }

  get key() {
    return this.form.elements.key.value.trim();
  }

  /** The method that draws trees (or chains), or `ar` where there is no drafter. */
  get method() {
    return this.form.elements.method.value || this.can?.method || "";
  }

  write(values) {
    for (const [name, value] of Object.entries(values)) {
      const field = this.form.elements[name];
      if (field) field.value = value;
    }
    this.wanted = values.method; // which may not be among the options yet
  }

  save() {
    const { key, ...rest } = this.values;
    this.wanted = rest.method ?? this.wanted;
    write(localStorage, STORE, { ...rest, method: this.wanted });
    write(sessionStorage, KEY_STORE, { key });
    this.applyTheme();
  }

  applyTheme() {
    const { theme } = this.values;
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  }

  /** Takes in what the server can do. */
  offer(can) {
    this.can = can;
    const { method, budget } = this.form.elements;
    const drafting = can.methods.filter(({ drafts }) => drafts);
    method.replaceChildren(...drafting.map(({ name, summary }) => new Option(name, name, false, false)));
    drafting.forEach(({ summary }, i) => (method.options[i].title = summary));
    const names = drafting.map(({ name }) => name);
    method.value = names.includes(this.wanted) ? this.wanted : (names.find((name) => name === can.method) ?? names[0]);
    budget.max = can.max_budget;
    this.adapt();
  }

  /** Shows what goes with the method. */
  adapt() {
    if (!this.can) return;
    const method = this.can.methods.find(({ name }) => name === this.method);
    const { budget } = this.form.elements;
    budget.disabled = method?.shape !== "tree";
    budget.placeholder = method?.shape === "tree" ? String(method.budget) : "has none";
    this.form.querySelector("#method-summary").textContent = method?.summary ?? "";
  }

  /** The fields of a request, decoded plainly or with the chosen method. */
  request(plain) {
    const { elements } = this.form;
    const number = (name) => (elements[name].value === "" ? undefined : elements[name].valueAsNumber);
    const temperature = number("temperature") ?? 0;
    return {
      method: plain ? "ar" : this.method || undefined,
      budget: plain || elements.budget.disabled ? undefined : number("budget"),
      temperature,
      top_p: temperature > 0 ? number("top_p") : undefined,
      seed: number("seed") ?? (temperature > 0 ? anySeed() : undefined),
      max_tokens: number("max_tokens"),
    };
  }

  /** The budget that counts: what is filled in, or the server's; null for a method without one. */
  get budget() {
    const chosen = this.form.elements.budget;
    return chosen.disabled ? null : chosen.value || chosen.placeholder;
  }

  /** The messages that open a conversation. */
  get opening() {
    const text = this.form.elements.system.value.trim();
    return text ? [{ role: "system", content: text }] : [];
  }

  /** Opens the form, at a field where one is to be filled in. */
  open(name = null) {
    this.dialog.showModal();
    if (name) this.form.elements[name].focus();
  }
}

/** A seed that survives being written as a number here, as 64 bits would not. */
export function anySeed() {
  return Math.floor(Math.random() * 2 ** 31);
}

function read(store, name) {
  try {
    return JSON.parse(store.getItem(name)) ?? {};
  } catch {
    return {}; // storage may be forbidden, or hold what an older page left
  }
}

function write(store, name, value) {
  try {
    store.setItem(name, JSON.stringify(value));
  } catch {
    // then it lasts as long as the page
  }
}
