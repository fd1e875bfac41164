"""Draws docs/figures/tree_growth.svg: a round of the default pair, its tree taken node by node, then verified.

    python docs/figures/tree_growth.py

Fetches the default model where it is not there yet. The round is the first of the answer in which at least two nodes
are accepted, one of them not its parent's likeliest child: a chain would have stopped there.
"""

from __future__ import annotations

from html import escape
from math import exp
from pathlib import Path

import dominotree as dt
from dominotree.generation import Round
from dominotree.token_names import TokenNames
from dominotree.tree.tree import Tree

PROMPT = "Why do leaves change colour in autumn?"
BUDGET = 8
FILE = Path(__file__).with_suffix(".svg")

COLUMN, ROW, BOX, HEIGHT = 110, 42, 88, 26
MARGIN, TITLE, GAP = 18, 48, 22
INK, FAINT, TAKEN, NEW, ACCEPTED, ADDED = "#24292f", "#8b929a", "#e8f1fa", "#0a7cc4", "#009e73", "#d55e00"

Place = tuple[float, float]


def record(pair: dt.Pair) -> list[Round]:
    """The rounds of the greedy answer to `PROMPT`."""
    rounds: list[Round] = []
    sampling = dt.SamplingParams(max_new_tokens=128)
    request = dt.Request(pair.prompt_ids(PROMPT), sampling, pair.drafting("dominotree", BUDGET), recorder=rounds.append)
    pair.decoder([request]).run([request])
    return rounds


def choose(rounds: list[Round]) -> int:
    """The place of the round to draw."""
    for number, one in enumerate(rounds):
        likeliest = all(one.tree.children(one.tree.parent[node])[0] == node for node in one.path)
        if number and len(one.path) > 1 and not likeliest:
            return number
    raise SystemExit("no round of this answer accepts two nodes off the likeliest path; try another prompt")


def layout(tree: Tree) -> dict[int, Place]:
    """Column and row of every node, -1 for the root: a column a depth, a row a leaf, parents level with their best."""
    places: dict[int, Place] = {}
    free = 0

    def put(node: int, depth: int) -> float:
        nonlocal free
        rows = [put(child, depth + 1) for child in tree.children(node)]
        if not rows:
            rows, free = [float(free)], free + 1
        places[node] = (depth, rows[0])
        return rows[0]

    put(-1, 0)
    return places


def draw(tree: Tree, path: list[int], names: list[str], root: str, added: str) -> str:
    """The figure: after 1, 3 and all nodes, and verified. `names` are the nodes' texts, `added` the model's token."""
    places = layout(tree)
    last = path[-1] if path else -1
    lowest = max(row for _, row in places.values())
    extra = (len(path) + 1, lowest + 1)  # the model's own token stands in a row of its own
    columns = 1 + max(extra[0], *(depth for depth, _ in places.values()))
    panels = [
        ("1. The best first token", "Candidates below the root are scored, the likeliest is taken.", 1, False),
        ("2. Three nodes", "The next best path may be deeper, or a branch beside it.", 3, False),
        (
            f"3. All {len(tree)} nodes",
            "Each time the path with the highest probability, whatever its depth.",
            None,
            False,
        ),
        ("4. Verified in one pass", "Green: what the model says itself. Orange: its own next token.", None, True),
    ]
    body, y = [], float(MARGIN)
    for title, text, count, verified in panels:
        part = [
            f'<text x="0" y="14" class="title">{title}</text>',
            f'<text x="0" y="33" class="note">{text}</text>',
        ]
        taken = range(len(tree) if count is None else count)
        for node in sorted(taken, key=lambda node: node in path):  # the accepted edges on top
            part.append(_edge(places[tree.parent[node]], places[node], verified and node in path))
        if verified:
            part.append(_edge(places[last], extra, True, ADDED))
        part.append(_box(places[-1], root, INK, "#ffffff"))
        for node in taken:
            accepted = verified and node in path
            newest = count is not None and node == count - 1
            stroke = ACCEPTED if accepted else NEW if newest else FAINT if verified else INK
            part.append(_box(places[node], names[node], stroke, "#e3f5ee" if accepted else TAKEN))
            part.append(_beside(places[node], f"{node + 1}: {exp(tree.score[node]):.2f}"))
        if verified:
            part.append(_box(extra, added, ADDED, "#fdefe4"))
        body.append(f'<g transform="translate({MARGIN} {y:g})">' + "\n".join(part) + "</g>")
        rows = extra[1] if verified else max(places[node][1] for node in taken)
        y += TITLE + (rows + 1) * ROW + GAP
    width, height = columns * COLUMN - (COLUMN - BOX) + 2 * MARGIN, y - GAP + MARGIN / 2
    style = (
        f"text{{font:13px system-ui,'DejaVu Sans',sans-serif;fill:{INK}}}.title{{font-weight:600;font-size:15px}}"
        f".note{{fill:#57606a;font-size:12.5px}}.token{{text-anchor:middle;font-family:ui-monospace,'DejaVu Sans Mono',"
        "monospace;font-size:12px}.order{text-anchor:middle;font-size:9.5px;fill:#57606a}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img">',
            f"<title>A draft tree grows to {len(tree)} nodes and is verified in one pass</title>",
            f"<style>{style}</style>",
            '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _corner(place: Place) -> Place:
    return place[0] * COLUMN, TITLE + place[1] * ROW


def _edge(above: Place, below: Place, strong: bool, colour: str = ACCEPTED) -> str:
    (x1, y1), (x2, y2) = _corner(above), _corner(below)
    x1, y1, y2 = x1 + BOX, y1 + HEIGHT / 2, y2 + HEIGHT / 2
    middle = x1 + (x2 - x1) / 2
    look = f'stroke="{colour}" stroke-width="2"' if strong else f'stroke="{FAINT}" stroke-width="1"'
    return f'<path d="M{x1:g} {y1:g}H{middle:g}V{y2:g}H{x2:g}" fill="none" {look}/>'


def _box(place: Place, text: str, stroke: str, fill: str) -> str:
    x, y = _corner(place)
    shown = text if len(text) <= 10 else text[:9] + "…"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" rx="4" fill="{fill}" stroke="{stroke}" '
        f'stroke-width="1.6"/><text x="{x + BOX / 2:g}" y="{y + 17:g}" class="token">{escape(shown)}</text>'
    )


def _beside(place: Place, text: str) -> str:
    x, y = _corner(place)
    return f'<text x="{x + BOX / 2:g}" y="{y + HEIGHT + 9:g}" class="order">{text}</text>'


def main() -> None:
    """Decodes the prompt and writes the figure beside this script."""
    pair = dt.load("smollm2-135m", dtype="float32")
    assert pair.codec is not None
    names = TokenNames(pair.codec)

    def named(token: int) -> str:
        return names.shown_text_of(token).replace(" ", "␣").replace("\n", "↵")

    rounds = record(pair)
    number = choose(rounds)
    chosen, tree = rounds[number], rounds[number].tree
    nodes = [named(token) for token in tree.token]
    root, added = named(rounds[number - 1].tokens[-1]), named(chosen.tokens[-1])
    FILE.write_text(draw(tree, list(chosen.path), nodes, root, added), encoding="utf-8")
    print(f"round {number + 1} of {len(rounds)}: {FILE}")


if __name__ == "__main__":
    main()
