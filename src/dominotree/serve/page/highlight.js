// Colours for code: comments, strings, numbers and the commonest keywords, whatever the language.

import { element } from "./dom.js";

const KEYWORDS =
  "abstract and as assert async await break case catch class const continue def default defer del do elif else enum " +
  "except export extends false False final finally fn for from func function global if impl implements import in " +
  "interface is lambda let match mod module mut namespace new nil None nonlocal not null or package pass private " +
  "protected public pub raise return self static struct super switch this throw trait true True try type typeof use " +
  "var void where while with yield SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE JOIN ON GROUP BY ORDER " +
  "LIMIT CREATE TABLE AND OR NOT NULL AS echo then fi done esac";

const HASH = new Set("python py sh bash shell zsh ruby rb yaml yml toml r perl make makefile dockerfile".split(" "));
const DASHES = new Set("sql lua haskell hs".split(" "));
const PROSE = new Set("text txt plain plaintext markdown md output".split(" "));

const STRING = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'|${"`"}(?:\\.|[^${"`"}\\])*${"`"}?`;
const NUMBER = String.raw`\b\d[\w.]*`;
const KEYWORD = String.raw`\b(?:${KEYWORDS.replaceAll(" ", "|")})\b`;

function patternFor(language) {
  const comment = HASH.has(language)
    ? String.raw`#[^\n]*`
    : DASHES.has(language)
      ? String.raw`--[^\n]*|/\*[^]*?(?:\*/|$)`
      : language === "html" || language === "xml"
        ? "<!-{2}[^]*?(?:-{2}>|$)"
        : String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)`;
  return new RegExp(`(?<comment>${comment})|(?<string>${STRING})|(?<number>${NUMBER})|(?<keyword>${KEYWORD})`, "g");
}

/** The nodes of a piece of code. */
export function highlight(code, language) {
  if (!language || PROSE.has(language)) return [code];
  const nodes = [];
  let end = 0;
  for (const match of code.matchAll(patternFor(language))) {
    const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    nodes.push(code.slice(end, match.index), element("span", { class: `code-${kind}` }, match[0]));
    end = match.index + match[0].length;
  }
  return [...nodes, code.slice(end)];
}
