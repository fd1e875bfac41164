// Two answers to one prompt, each recorded alone, replayed on one clock.

import { element, figure, iconButton, prefersStillness, setIcon } from "./dom.js";
import { Figures } from "./panel.js";
import { Run } from "./run.js";
import { Tokens } from "./tokens.js";

const STEPS = 400; // of the clock's slider
const SPEEDS = [
  ["1", "1× speed"],
  ["0.5", "½ speed"],
  ["0.25", "¼ speed"],
  ["0.1", "1⁄10 speed"],
];

class Lane {
  constructor(title) {
    this.title = element("h3", {}, title);
    this.state = element("span", { class: "state" });
    this.figures = new Figures(["tokens/s", "tau", "tokens"]);
    this.tokens = new Tokens();
    this.bar = element("progress", { max: 1, value: 0, "aria-label": `${title}: progress` });
    const head = element("header", {}, this.title, this.state);
    this.root = element("section", { class: "lane" }, head, this.figures.root, this.bar, this.tokens.root);
    this.run = null;
  }

  /** Begins a recording, or shows one that is complete. */
  load(run, title) {
    this.run = run;
    this.title.textContent = title;
    this.tokens.clear();
    this.update();
    this.seek(-1);
  }

  update() {
    this.tokens.update(this.run);
  }

  /** Shows what was there at a time. */
  seek(ms) {
    const run = this.run;
    const index = run.at(ms);
    this.tokens.until(index);
    const { tokens, tau, speed } = run.figures(index);
    this.figures.set([figure(speed, 1), figure(tau, 2), tokens]);
    const done = run.length > 0 && index === run.length - 1;
    this.bar.value = run.length ? tokens / run.counts.at(-1) : 0;
    this.state.textContent = done ? `done in ${figure(run.duration / 1000, 2)} s` : "";
    this.root.classList.toggle("done", done);
  }
}

/** The two lanes and their clock. */
export class Race {
  constructor(root) {
    this.plain = new Lane("Plain decoding");
    this.tree = new Lane("With the tree");
    this.lanes = [this.plain, this.tree];
    this.result = element("p", { class: "result", role: "status" });
    this.play = iconButton("play", "Replay the race", () => this.toggle());
    this.time = element("input", { type: "range", min: 0, max: STEPS, value: 0, "aria-label": "Time" });
    this.clock = element("output", { class: "clock" }, "0.00 s");
    const options = SPEEDS.map(([value, text]) => new Option(text, value));
    this.speed = element("select", { "aria-label": "Speed of the replay" }, ...options);
    this.time.addEventListener("input", () => {
      this.stop();
      this.seek(this.end * (this.time.valueAsNumber / STEPS)); // at the last step exactly the end
    });
    this.controls = element("div", { class: "controls" }, this.play, this.time, this.clock, this.speed);
    root.append(element("div", { class: "lanes" }, this.plain.root, this.tree.root), this.controls, this.result);
    this.frame = 0;
    this.ready(false);
  }

  ready(yes) {
    for (const control of [this.play, this.time, this.speed]) control.disabled = !yes;
  }

  /** Records both, the plain one first. `ask(plain)` yields the entries of a trace. */
  async record(ask, method) {
    this.stop();
    this.ready(false);
    this.result.textContent = "";
    const runs = [new Run("ar"), new Run(method)];
    this.plain.load(runs[0], "Plain decoding");
    this.tree.load(runs[1], `With ${method}`);
    try {
      for (const [i, lane] of this.lanes.entries()) {
        lane.state.textContent = "recording …";
        for await (const entry of ask(i === 0)) {
          runs[i].add(entry);
          lane.figures.set(["–", "–", runs[i].counts.at(-1)]);
        }
        lane.state.textContent = "recorded";
      }
    } catch (error) {
      for (const lane of this.lanes) lane.state.textContent = "not recorded";
      throw error;
    }
    this.show(...runs, { play: true });
  }

  /** Shows two recorded runs, as they ended or from the start on. */
  show(plain, tree, { play }) {
    this.plain.load(plain, "Plain decoding");
    this.tree.load(tree, `With ${tree.method}`);
    this.end = Math.max(plain.duration, tree.duration);
    this.ready(true);
    this.result.textContent = verdict(plain, tree);
    if (play && !prefersStillness()) this.toggle(0);
    else this.seek(this.end);
  }

  seek(ms) {
    this.at = Math.min(ms, this.end);
    this.time.value = this.end ? Math.round((STEPS * this.at) / this.end) : 0;
    this.clock.textContent = `${figure(this.at / 1000, 2)} s`;
    this.time.setAttribute("aria-valuetext", `${figure(this.at / 1000, 2)} seconds`);
    for (const lane of this.lanes) lane.seek(this.at);
  }

  /** Plays, from `from` or from here; from the start when at the end. Stops when playing. */
  toggle(from = null) {
    if (this.frame) return this.stop();
    let at = from ?? (this.at >= this.end ? 0 : this.at);
    let before = performance.now();
    const tick = (now) => {
      at += Math.max(0, now - before) * Number(this.speed.value);
      before = now;
      this.seek(at);
      this.frame = at < this.end ? requestAnimationFrame(tick) : 0;
      if (!this.frame) this.stop();
    };
    this.frame = requestAnimationFrame(tick);
    setIcon(this.play, "pause", "Pause");
  }

  stop() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    setIcon(this.play, "play", "Replay the race");
  }
}

/** How it ended, in a sentence. */
function verdict(plain, tree) {
  const [a, b] = [plain.tokens, tree.tokens];
  const parts = a.findIndex((token, i) => token !== b[i]);
  const same = parts < 0 && a.length === b.length;
  const speedup = tree.figures(tree.length - 1).speed / plain.figures(plain.length - 1).speed;
  const pace = Number.isFinite(speedup) ? `${tree.method} was ${figure(speedup, 2)} times as fast, ` : "";
  if (same) return `${pace}with the same ${a.length} tokens.`;
  return `${pace}and the answers part at token ${(parts < 0 ? b.length : parts) + 1}: sums are rounded differently here.`;
}
