import xml.etree.ElementTree as ElementTree

import pytest

from dominotree.bench import figures
from dominotree.bench.records import CalibrationBin, Record
from dominotree.bench.statistics import METHOD_ORDER, cells, collect
from dominotree.bench.tables import MissingData


def record(method, budget=None, tau=2.0, run="a", dataset="gsm8k", **more):
    speed = 10 * tau
    return Record(run, "m", method, budget, dataset, 0.0, 0, 0, 100, 100 / speed, speed, tau, **more)


@pytest.fixture(scope="module")
def series():
    stages = {"draft": 3.0, "build": 2.0, "verify": 18.0, "commit": 0.5}
    return collect(
        [record("ar", tau=1.0), record("domino", stage_ms=stages, accepted=[3, 1, 2])]
        + [record("dominotree", b, 3.0 + b / 16, stage_ms=stages, accepted=[4, 3]) for b in (4, 16)]
        + [record("dominotree", 16, 2.5 + m / 64, variant=f"M={m}") for m in (8, 64)]
        + [record("my$method_", 16)]
    )


def drawn(series):
    measured = cells(series)
    bins = [CalibrationBin("a", 0, n, p, p**2) for n, p in ((10, 0.1), (400, 0.9))]
    return [
        figures.speed_bars(series, "speedup", "here"),
        figures.stage_bars(series, "stages", "here"),
        figures.budget_lines(measured, "budget", "here"),
        figures.width_lines(measured, "width", "here"),
        figures.depth_lines(series, "depth", "here"),
        figures.calibration_lines(bins, "calibration", "here"),
    ]


def test_every_figure_is_well_formed_svg_and_png_for_both_grounds(series):
    for drawing in drawn(series):
        ElementTree.fromstring(drawing.svg)
        assert drawing.png.startswith(b"\x89PNG")
        assert drawing.png_dark.startswith(b"\x89PNG")
        assert drawing.png != drawing.png_dark


def test_text_follows_the_readers_colour_scheme(series):
    drawing = figures.stage_bars(series, "stages", "here")
    assert "prefers-color-scheme:dark" in drawing.svg
    assert "currentColor" in drawing.svg
    assert "<style>:root" not in drawing.inline_svg
    assert drawing.inline_svg.startswith("<svg")


def test_figures_inlined_into_one_page_share_no_id(series):
    ids = []
    for drawing in drawn(series):
        for element in ElementTree.fromstring(drawing.inline_svg).iter():
            ids += [element.attrib["id"]] if "id" in element.attrib else []
    assert len(ids) == len(set(ids))


def test_the_same_data_gives_the_same_bytes(series):
    assert figures.speed_bars(series, "s", "here") == figures.speed_bars(series, "s", "here")


def test_names_are_shown_as_written(series):
    assert "my$method_@16" in figures.speed_bars(series, "speedup", "here").svg.replace("\\$", "$")


def test_the_fastest_budget_of_a_method_stands_for_it(series):
    drawing = figures.speed_bars(series, "speedup", "here")
    assert "dominotree@16" in drawing.svg
    assert "dominotree@4" not in drawing.svg
    assert "fastest budget" in drawing.caption


def test_each_method_has_a_colour_of_its_own():
    assert len({figures._colour(method) for method in METHOD_ORDER}) == len(METHOD_ORDER)
    assert figures._colour("mine") == figures._colour("mine")


def test_missing_data_is_named():
    bare = collect([record("ar")])
    for make, data, reason in (
        (figures.speed_bars, bare, "besides ar"),
        (figures.stage_bars, bare, "stage_ms"),
        (figures.budget_lines, cells(bare), "two budgets"),
        (figures.width_lines, cells(bare), "M=<width>"),
        (figures.depth_lines, bare, "accepted"),
        (figures.calibration_lines, [], "calibration.jsonl"),
    ):
        with pytest.raises(MissingData, match=reason):
            make(data, "f", "here")
