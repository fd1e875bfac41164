// The answer as its tokens, every round in a colour of its own.

import { element } from "./dom.js";

const COLOURS = 6;

/** The class that gives round `index` its colour. */
export function colour(index) {
  return `r${index % COLOURS}`;
}

/** Shows the tokens of a run; `onPick` is told of the round that is clicked. */
export class Tokens {
  constructor(onPick = null) {
    this.root = element("div", { class: "tokens", "aria-hidden": "true" }); // the answer itself is what is read out
    this.rounds = [];
    this.current = -1;
    this.visible = 0;
    if (onPick) {
      this.root.classList.add("pickable");
      this.root.addEventListener("click", ({ target }) => {
        const round = target.closest(".round");
        if (round) onPick(this.rounds.indexOf(round));
      });
    }
  }

  clear() {
    this.root.replaceChildren();
    [this.rounds, this.current, this.visible] = [[], -1, 0];
  }

  /** Adds the entries of `run` that are not there yet. */
  update(run) {
    for (let i = this.rounds.length; i < run.length; i++) {
      const round = element("span", { class: `round ${colour(i)}` });
      const { tokens } = run.entries[i];
      tokens.forEach((token, place) => {
        const kind = i > 0 && place === tokens.length - 1 ? "token own" : "token";
        if (token.piece) round.append(element("span", { class: kind }, token.piece.replaceAll("\n", "↵\n")));
      });
      this.rounds.push(round);
      this.root.append(round);
    }
    this.visible = this.rounds.length;
  }

  /** Marks a round. */
  mark(index) {
    this.rounds[this.current]?.classList.remove("current");
    this.current = index;
    this.rounds[index]?.classList.add("current");
    this.follow(index);
  }

  /** Shows nothing behind round `index`. */
  until(index) {
    for (; this.visible > index + 1; this.visible--) this.rounds[this.visible - 1].hidden = true;
    for (; this.visible <= index; this.visible++) this.rounds[this.visible].hidden = false;
    this.follow(index);
  }

  /** Scrolls so that a round is in sight, without moving the page. */
  follow(index) {
    const round = this.rounds[index];
    if (!round) return;
    const [box, place] = [this.root.getBoundingClientRect(), round.getBoundingClientRect()];
    if (place.bottom > box.bottom) this.root.scrollTop += place.bottom - box.bottom + 8;
    else if (place.top < box.top) this.root.scrollTop -= box.top - place.top + 8;
  }
}
