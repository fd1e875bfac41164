// An answer as the decoder made it: the rounds of a trace, and what they add up to.

export class Run {
  /** `entries` are those of a trace; entry 0 is the pass over the prompt. Times are milliseconds of decoding. */
  constructor(method, entries = []) {
    this.method = method;
    this.entries = [];
    this.ends = [];
    this.counts = [];
    for (const entry of entries) this.add(entry);
  }

  add(entry) {
    const spent = this.entries.length ? total(entry.ms) : 0;
    this.ends.push((this.ends.at(-1) ?? 0) + spent);
    this.counts.push((this.counts.at(-1) ?? 0) + entry.tokens.length);
    this.entries.push(entry);
  }

  get length() {
    return this.entries.length;
  }

  /** Milliseconds from the first token to the last. */
  get duration() {
    return this.ends.at(-1) ?? 0;
  }

  /** The tokens' ids. */
  get tokens() {
    return this.entries.flatMap((entry) => entry.tokens.map((token) => token.id));
  }

  /** Figures up to and including entry `index`; null where there are none yet. */
  figures(index) {
    if (index < 0) return { tokens: 0, rounds: 0, tau: null, speed: null };
    const tokens = this.counts[index];
    const speed = index > 0 ? (1000 * tokens) / this.ends[index] : null;
    return { tokens, rounds: index, tau: index > 0 ? (tokens - this.counts[0]) / index : null, speed };
  }

  /** The last entry that is over at `ms`; -1 before the first. */
  at(ms) {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] <= ms) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }
}

/** The sum of an object's values. */
export function total(parts) {
  return Object.values(parts).reduce((sum, part) => sum + part, 0);
}

/** A token's text with its white space made visible. */
export function visible(text) {
  return text
    .replace(/\r?\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/^ +| +$| {2,}/g, (spaces) => "·".repeat(spaces.length));
}

/** One sentence about an entry, for captions and for screen readers. */
export function describe(entry) {
  const texts = entry.tokens.map((token) => `“${visible(token.text)}”`);
  const own = texts.pop();
  if (entry.root === null) return `The pass over the prompt gave the first token, ${own}.`;
  const round = `Round ${entry.round}`;
  if (entry.nodes.length === 0) return `${round}: nothing drafted; the model added ${own}.`;
  const drafted = `${round}: ${entry.nodes.length} drafted`;
  if (texts.length === 0) return `${drafted}, none accepted; the model added ${own}.`;
  return `${drafted}, ${texts.length} accepted: ${texts.join(" ")}; the model added ${own}.`;
}
