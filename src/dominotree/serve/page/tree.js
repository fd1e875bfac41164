// The drawing of one round: the root at the left, depth to the right, what was accepted in a straight line on top.

import { svg } from "./dom.js";
import { describe, visible } from "./run.js";

const ROW = 30;
const PILL = 22;
const GAP = 26;
const MARGIN = 8;
const LONGEST = 14;
const FONT = '12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';

/**
 * Places a round's tokens on a grid. Gives a list of `{text, prob, score, kind, above, column, row}` in drawing order;
 * `above` is a place in the list. Kinds: root, accepted, own (what the model added), rejected.
 */
export function layout(entry) {
  const accepted = new Set(entry.path);
  const own = entry.tokens.at(-1);
  const end = entry.path.at(-1) ?? -1;
  const children = new Map();
  entry.nodes.forEach((node, place) => {
    children.set(node.parent, [...(children.get(node.parent) ?? []), place]);
  });
  const placed = [];
  let lowest = 0;
  const put = (place, above, column, row) => {
    const node = entry.nodes[place];
    const kind = accepted.has(place) ? "accepted" : "rejected";
    visit(place, add({ text: node.text, id: node.id, prob: node.prob, score: node.score, kind, above, column, row }));
  };
  const add = (shown) => placed.push(shown) - 1;
  const visit = (place, at) => {
    const { column, row } = placed[at];
    let below = children.get(place) ?? [];
    below = [...below.filter((child) => accepted.has(child)), ...below.filter((child) => !accepted.has(child))];
    let free = true; // the row of the parent goes to the first below it
    const nextRow = () => (free ? ((free = false), row) : ++lowest);
    if (place === end) {
      const drafted = below.find((child) => entry.nodes[child].id === own.id);
      const known = drafted === undefined ? {} : { prob: entry.nodes[drafted].prob, score: entry.nodes[drafted].score };
      const shown = { text: own.text, id: own.id, kind: "own", above: at, column: column + 1, row: nextRow(), ...known };
      const place = add(shown);
      if (drafted !== undefined) visit(drafted, place); // the answer ended with a drafted token
      below = below.filter((child) => child !== drafted);
    }
    for (const child of below) put(child, at, column + 1, nextRow());
  };
  const root = entry.root ?? { text: "prompt" };
  visit(-1, add({ text: root.text, id: root.id, kind: "root", above: null, column: 0, row: 0 }));
  return placed;
}

let pen = null;

function widthOf(text) {
  pen ??= document.createElement("canvas").getContext("2d");
  pen.font = FONT;
  return pen.measureText(text).width;
}

/** The drawing of a trace's entry, an SVG element of its natural size. */
export function drawTree(entry) {
  const shown = layout(entry).map((node) => {
    const whole = node.id === undefined ? node.text : visible(node.text);
    const label = [...whole].length > LONGEST ? [...whole].slice(0, LONGEST - 1).join("") + "…" : whole;
    const share = node.prob === undefined ? "" : node.prob === 0 ? "↺" : percent(node.prob);
    return { ...node, label, share, width: widthOf(label) + 18 + (share ? widthOf(share) * 0.84 + 6 : 0) };
  });
  const widths = [];
  for (const { column, width } of shown) widths[column] = Math.max(widths[column] ?? 0, width);
  const lefts = [MARGIN];
  widths.forEach((width, column) => lefts.push(lefts[column] + width + GAP));
  const right = lefts.at(-1) - GAP + MARGIN;
  const bottom = Math.max(...shown.map((node) => node.row)) * ROW + PILL + 2 * MARGIN;
  const at = (node) => ({ x: lefts[node.column], y: MARGIN + node.row * ROW });
  const edges = svg("g", { class: "edges" });
  const pills = svg("g");
  for (const node of shown) {
    const { x, y } = at(node);
    // what is above comes first, so that its edge lies on top of those to the siblings
    if (node.above !== null) edges.prepend(edge(shown[node.above], at(shown[node.above]), node, { x, y }));
    pills.append(pill(node, x, y));
  }
  return svg(
    "svg",
    {
      class: "tree",
      viewBox: `0 0 ${right} ${bottom}`,
      width: right,
      height: bottom,
      role: "img",
      "aria-label": describe(entry),
    },
    edges,
    pills,
  );
}

function edge(parent, from, node, to) {
  const [x0, y0, x1, y1] = [from.x + parent.width, from.y + PILL / 2, to.x, to.y + PILL / 2];
  const down = x1 - GAP / 2; // between the columns, where no token is in the way
  const d = y0 === y1 ? `M${x0} ${y0}H${x1}` : `M${x0} ${y0}H${down - 6}q6 0 6 6V${y1 - 6}q0 6 6 6H${x1}`;
  return svg("path", { class: `edge ${node.kind}`, d, "stroke-width": 1 + 2.5 * (node.prob ?? 0.4) });
}

function pill(node, x, y) {
  const label = svg("text", { x: x + 9, y: y + PILL / 2, class: "label" });
  for (const part of node.label.split(/(·+|↵|⇥|…)/)) {
    const faint = node.id !== undefined && /^(·+|↵|⇥|…)$/.test(part);
    label.append(faint ? svg("tspan", { class: "faint" }, part) : part);
  }
  const parts = [svg("title", {}, explain(node)), svg("rect", { x, y, width: node.width, height: PILL, rx: 7 }), label];
  if (node.share) parts.push(svg("text", { x: x + node.width - 8, y: y + PILL / 2, class: "share" }, node.share));
  return svg("g", { class: `node ${node.kind}` }, ...parts);
}

function explain(node) {
  if (node.id === undefined) return "the prompt";
  const name = `“${visible(node.text)}”, token ${node.id}`;
  if (node.kind === "root") return `${name}: the last token before this round`;
  const source = node.prob === 0 ? "as the text had it before" : `drafted with ${percent(node.prob)} here`;
  const chance = node.prob === undefined ? "" : `; ${source}, ${percent(Math.exp(node.score))} for the whole path`;
  if (node.kind === "own") return `${name}: added by the model${chance}`;
  return `${name}: ${node.kind === "accepted" ? "accepted" : "not accepted"}${chance}`;
}

function percent(share) {
  const value = 100 * share;
  return value >= 0.95 ? `${Math.round(value)}%` : value >= 0.1 ? `${value.toFixed(1)}%` : "<0.1%";
}
