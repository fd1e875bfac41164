// What the decoder did: figures, the tree of a round, a scrubber through all rounds, the tokens.

import { element, figure, iconButton, oncePerFrame, setIcon, svg } from "./dom.js";
import { describe, total, visible } from "./run.js";
import { colour, Tokens } from "./tokens.js";
import { drawTree } from "./tree.js";

const STEP_MS = 450;
const SMALLEST = 0.72;
const FEWEST_BARS = 24; // the width of the scrubber; with fewer rounds it is not filled

/** The panel for one run at a time. It follows a run that grows until the reader goes to an earlier round. */
export class Panel {
  constructor(root) {
    this.root = root;
    this.run = null;
    this.index = -1;
    this.following = true;
    this.playing = 0;
    this.figures = new Figures(["tau", "tokens/s", "tokens", "rounds"]);
    this.drawing = element("div", { class: "drawing", tabIndex: 0, role: "region", "aria-label": "Tree of the round" });
    this.caption = element("p", { class: "caption" });
    this.stages = element("div", { class: "stages" });
    this.scrubber = new Scrubber((index) => this.show(index));
    this.tokens = new Tokens((index) => this.show(index));
    this.play = iconButton("play", "Play the rounds", () => this.toggle());
    this.latest = iconButton("latest", "To the latest round", () => this.show(this.run.length - 1));
    const previous = iconButton("previous", "Previous round", () => this.show(this.index - 1));
    const next = iconButton("next", "Next round", () => this.show(this.index + 1));
    this.buttons = [previous, this.play, next, this.latest];
    const fold = element("button", { type: "button", class: "fold quiet", "aria-expanded": "true" }, "Less");
    fold.addEventListener("click", () => {
      const folded = this.filled.classList.toggle("folded");
      fold.setAttribute("aria-expanded", String(!folded));
      fold.textContent = folded ? "More" : "Less";
    });
    this.filled = element(
      "div",
      { class: "filled" },
      element("div", { class: "head" }, this.figures.root, fold),
      this.drawing,
      element("div", { class: "explained" }, this.caption, this.stages),
      element("div", { class: "controls" }, previous, this.play, next, this.scrubber.root, this.latest),
      this.tokens.root,
    );
    this.root.append(this.filled);
    this.update = oncePerFrame(() => this.draw());
    new ResizeObserver(() => this.fit()).observe(this.drawing);
    this.follow(null);
  }

  /** Shows `run` from now on (null: none), at its last round. */
  follow(run) {
    this.stop();
    this.run = run;
    this.following = true;
    this.index = -1;
    this.drawn = null;
    this.tokens.clear();
    this.scrubber.clear();
    this.root.classList.toggle("empty", run === null);
    this.draw();
  }

  /** Goes to a round. */
  show(index) {
    if (!this.run?.length) return;
    this.index = Math.min(Math.max(index, 0), this.run.length - 1);
    this.following = this.index === this.run.length - 1;
    this.draw();
  }

  /** Plays the rounds from here, or from the start when at the end; stops when playing. */
  toggle() {
    if (this.playing) return this.stop();
    if (!this.run?.length) return;
    if (this.index === this.run.length - 1) this.show(0);
    this.playing = setInterval(() => {
      this.show(this.index + 1);
      if (this.index === this.run.length - 1) this.stop();
    }, STEP_MS);
    setIcon(this.play, "pause", "Pause");
  }

  stop() {
    if (this.playing) clearInterval(this.playing);
    this.playing = 0;
    setIcon(this.play, "play", "Play the rounds");
  }

  /** Draws what is new. */
  draw() {
    const run = this.run;
    if (run && this.following) this.index = run.length - 1;
    const entry = run?.entries[this.index];
    for (const button of this.buttons) button.disabled = !entry;
    if (!entry) {
      this.figures.clear();
      this.drawing.replaceChildren();
      this.caption.replaceChildren();
      this.stages.replaceChildren();
      return;
    }
    const { tau, speed, tokens, rounds } = run.figures(this.index);
    this.figures.set([figure(tau, 2), figure(speed, 1), tokens, rounds]);
    this.buttons[0].disabled = this.index === 0;
    this.buttons[2].disabled = this.buttons[3].disabled = this.index === run.length - 1;
    this.scrubber.update(run, this.index);
    this.tokens.update(run);
    this.tokens.mark(this.index);
    if (entry !== this.drawn) {
      this.drawing.replaceChildren(drawTree(entry));
      this.drawing.scrollTo(0, 0);
      this.fit();
      this.caption.replaceChildren(...caption(entry));
      this.stages.replaceChildren(...stages(entry.ms));
      this.drawn = entry;
    }
  }

  /** Makes the drawing as large as there is room, within what can be read. */
  fit() {
    const drawing = this.drawing.firstElementChild;
    if (!drawing) return;
    const { width, height } = drawing.viewBox.baseVal;
    const room = Math.min((this.drawing.clientWidth - 1) / width, (this.drawing.clientHeight - 1) / height);
    const scale = Math.min(Math.max(room, SMALLEST), 1.15);
    drawing.setAttribute("width", width * scale);
    drawing.setAttribute("height", height * scale);
  }
}

/** A row of named numbers. */
export class Figures {
  constructor(names) {
    this.values = names.map(() => element("dd", {}, "–"));
    const pairs = names.map((name, i) => element("div", {}, element("dt", {}, name), this.values[i]));
    this.root = element("dl", { class: "figures" }, ...pairs);
  }

  set(texts) {
    texts.forEach((text, i) => {
      if (this.values[i].textContent !== String(text)) this.values[i].textContent = text;
    });
  }

  clear() {
    this.set(this.values.map(() => "–"));
  }
}

/** What `describe` says, the tokens in the colours of the drawing. */
function caption(entry) {
  const chips = entry.tokens.map(({ text }, i) => {
    const kind = i < entry.tokens.length - 1 ? "accepted" : "own";
    return element("span", { class: `chip ${kind}` }, visible(text));
  });
  const own = chips.pop();
  if (entry.root === null) return ["The pass over the prompt gave the first token ", own];
  const drafted = entry.nodes.length ? `${entry.nodes.length} drafted, ` : "";
  const accepted = chips.length ? [`${chips.length} accepted `, ...chips, ", "] : entry.nodes.length ? ["none accepted, "] : [];
  return [`Round ${entry.round}: ${drafted}`, ...accepted, "the model added ", own];
}

function stages(ms) {
  const all = total(ms);
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const texts = [];
  for (const [stage, spent] of Object.entries(ms)) {
    const part = element("span", { class: `stage ${stage}` });
    part.style.flexGrow = spent / (all || 1);
    bar.append(part);
    const key = element("i", { class: `stage ${stage}` });
    texts.push(element("span", { class: "key" }, key, `${stage} ${figure(spent, 1)}`));
  }
  return [bar, element("p", {}, ...texts, element("span", { class: "sum" }, `${figure(all, 1)} ms`))];
}

/** A bar for every round, as high as the tokens it committed, and a slider through them. */
class Scrubber {
  constructor(onChange) {
    this.input = element("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Round" });
    this.input.addEventListener("input", () => onChange(this.input.valueAsNumber));
    this.group = svg("g");
    this.chart = svg("svg", { preserveAspectRatio: "none", "aria-hidden": "true" }, this.group);
    this.root = element("div", { class: "scrubber" }, this.chart, this.input);
    const pick = ({ clientX }) => {
      const { left, width } = this.chart.getBoundingClientRect();
      onChange(Math.floor(((clientX - left) / width) * this.span));
    };
    this.root.addEventListener("pointerdown", (event) => {
      this.root.setPointerCapture(event.pointerId);
      this.input.focus({ preventScroll: true });
      event.preventDefault();
      pick(event);
    });
    this.root.addEventListener("pointermove", (event) => {
      if (this.root.hasPointerCapture(event.pointerId)) pick(event);
    });
    this.clear();
  }

  clear() {
    [this.bars, this.span, this.highest, this.current] = [[], FEWEST_BARS, 4, -1];
    this.group.replaceChildren();
    this.input.max = this.input.value = 0;
  }

  update(run, index) {
    for (let i = this.bars.length; i < run.length; i++) {
      const height = run.entries[i].tokens.length;
      this.highest = Math.max(this.highest, height);
      const bar = svg("rect", { class: colour(i), x: i + 0.08, y: -height, width: 0.84, height });
      this.bars.push(bar);
      this.group.append(bar);
    }
    this.span = Math.max(this.bars.length, FEWEST_BARS);
    this.chart.setAttribute("viewBox", `0 ${-this.highest} ${this.span} ${this.highest}`);
    this.bars[this.current]?.classList.remove("current");
    this.current = index;
    this.bars[index].classList.add("current");
    this.input.max = run.length - 1;
    this.input.value = index;
    this.input.setAttribute("aria-valuetext", describe(run.entries[index]));
  }
}
