// Markdown as models write it, into elements. Text only ever becomes text nodes, links only http, https and mailto.

import { element } from "./dom.js";
import { highlight } from "./highlight.js";

const DEEPEST = 6;
const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const ROW = /^\s*\|?(.+?)\|?\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Text that grows: `update` redraws only the blocks that have changed. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.sources = [];
  }

  update(text) {
    const found = blocks(text.replaceAll("\r\n", "\n").split("\n"));
    let same = 0;
    while (same < found.length && same < this.sources.length && found[same].source === this.sources[same]) same++;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...found.slice(same).map((block) => block.build(0)));
    this.sources = found.map((block) => block.source);
  }
}

/** Splits lines into blocks, each with its `source` and how to `build` it. */
function blocks(lines) {
  const found = [];
  let at = 0;
  const take = (count, build) => {
    const part = lines.slice(at, at + count);
    found.push({ source: part.join("\n"), build: (depth) => build(part, depth) });
    at += count;
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at++;
    else if (FENCE.test(line)) take(fenceLength(lines, at), buildCode);
    else if (HEADING.test(line)) take(1, buildHeading);
    else if (RULE.test(line)) take(1, () => element("hr"));
    else if (QUOTE.test(line)) take(runLength(lines, at, (l) => l.trim() && !FENCE.test(l)), buildQuote);
    else if (ITEM.test(line)) take(listLength(lines, at), buildList);
    else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-"))
      take(runLength(lines, at, (l) => l.trim() && l.includes("|")), buildTable);
    else take(paragraphLength(lines, at), (part) => element("p", {}, ...inline(part.map((l) => l.trim()).join("\n"))));
  }
  return found;
}

function runLength(lines, at, holds) {
  let count = 1;
  while (at + count < lines.length && holds(lines[at + count])) count++;
  return count;
}

function paragraphLength(lines, at) {
  const opens = (l) => FENCE.test(l) || HEADING.test(l) || RULE.test(l) || QUOTE.test(l) || ITEM.test(l);
  return runLength(lines, at, (l) => l.trim() && !opens(l));
}

function fenceLength(lines, at) {
  const [, , mark] = FENCE.exec(lines[at]);
  const closes = (l) => l.trim().startsWith(mark) && !l.trim().replaceAll(mark[0], "");
  const body = lines.slice(at + 1).findIndex(closes);
  return body < 0 ? lines.length - at : body + 2;
}

/** A list goes on over blank lines as long as items or indented lines follow. */
function listLength(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  let count = 1;
  for (let i = at + 1; i < lines.length; i++) {
    const item = ITEM.exec(lines[i]);
    const inside = lines[i].startsWith(" ".repeat(indent.length + 2));
    if (!lines[i].trim()) continue;
    const sibling = item && (item[1].length > indent.length + 1 || /\d/.test(item[2]) === ordered);
    const lazy = !item && i === at + count && !HEADING.test(lines[i]) && !FENCE.test(lines[i]) && !RULE.test(lines[i]);
    if (!(inside || lazy || sibling) || RULE.test(lines[i])) break;
    count = i - at + 1;
  }
  return count;
}

function buildHeading([line]) {
  const [, marks, text] = HEADING.exec(line);
  const level = Math.min(marks.length + 2, 6); // the page has its own first two
  return element(`h${level}`, {}, ...inline(text.replace(/\s#+\s*$/, "")));
}

function buildCode(lines) {
  const [, indent, mark, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const body = lines.slice(1, closed ? -1 : undefined);
  const code = body.map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line)).join("\n");
  const copy = element("button", { type: "button", class: "copy", onclick: () => copyText(copy, code) }, "Copy");
  const name = element("span", {}, language || "code");
  const text = element("pre", { tabIndex: 0 }, element("code", {}, ...highlight(code, language.toLowerCase())));
  return element("div", { class: "code" }, element("div", { class: "code-bar" }, name, copy), text);
}

async function copyText(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function buildNested(lines, depth) {
  if (depth >= DEEPEST) return [lines.join("\n")];
  return blocks(lines).map((block) => block.build(depth + 1));
}

function buildQuote(lines, depth) {
  return element("blockquote", {}, ...buildNested(lines.map((line) => line.replace(QUOTE, "")), depth));
}

function buildList(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push({ lines: [item[4]], loose: false });
    else items.at(-1).lines.push(line.replace(/^ {1,4}|^\t/, ""));
  }
  const made = items.map((item) => {
    const parts = buildNested(item.lines, depth);
    if (parts[0] instanceof HTMLParagraphElement) parts.splice(0, 1, ...parts[0].childNodes); // items stand close
    return element("li", {}, ...parts);
  });
  const list = element(ordered ? "ol" : "ul", {}, ...made);
  if (ordered) list.start = Number.parseInt(mark, 10);
  return list;
}

function buildTable(lines) {
  const cells = (line) => ROW.exec(line)[1].split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  const head = element("thead", {}, row(lines[0], "th"));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", { class: "table", tabIndex: 0 }, element("table", {}, head, body));
}

const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[!-/:-@[-${"`"}{-~])`,
    String.raw`(?<ticks>${"`"}+)(?<code>[^${"`"}]|[^${"`"}].*?[^${"`"}])\k<ticks>(?!${"`"})`,
    String.raw`!?\[(?<label>[^\[\]\n]*)\]\((?<href>[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+"[^"\n]*")?\)`,
    String.raw`(?<url>https?://[^\s<>"'${"`"}]*[^\s<>"'${"`"}.,;:!?)\]*_])`,
    String.raw`\*\*(?<strong>\S(?:[^*\n]|\*(?!\*))*?)\*\*`,
    String.raw`(?<![\w_])__(?<strong2>\S[^_\n]*?)__(?![\w_])`,
    String.raw`\*(?<em>[^\s*](?:[^*\n]*[^\s*])?)\*`,
    String.raw`(?<![\w_])_(?<em2>[^\s_](?:[^_\n]*[^\s_])?)_(?![\w_])`,
    String.raw`~~(?<del>\S[^~\n]*?)~~`,
    String.raw`(?<newline>\n)`,
  ].join("|"),
  "gs",
);

/** The nodes of running text. */
function inline(text, depth = 0) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index), span(match, depth));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}

function span(match, depth) {
  const { escaped, code, label, href, url, newline } = match.groups;
  const within = (inner) => (depth < DEEPEST ? inline(inner, depth + 1) : [inner]);
  if (escaped !== undefined) return escaped;
  if (newline !== undefined) return element("br");
  if (code !== undefined) return element("code", {}, code.replaceAll("\n", " "));
  if (url !== undefined) return link(url, [url]) ?? match[0];
  if (href !== undefined) return link(href, within(label || href)) ?? match[0];
  for (const tag of ["strong", "em", "del"]) {
    const inner = match.groups[tag] ?? match.groups[`${tag}2`];
    if (inner !== undefined) return element(tag, {}, ...within(inner));
  }
  return match[0];
}

function link(href, children) {
  if (!URL.canParse(href) || !/^(https?|mailto):$/.test(new URL(href).protocol)) return null;
  return element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
