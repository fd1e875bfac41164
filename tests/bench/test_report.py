import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dominotree.bench.records import InvalidRecord
from dominotree.bench.report import InvalidReport, write_report
from dominotree.cli.report import report


def line(method="ar", budget=None, speed=10.0, sample=0, dataset="gsm8k", run="a", temperature=0.0, **more):
    values = {"run": run, "model": "tiny", "method": method, "budget": budget, "dataset": dataset}
    values |= {"temperature": temperature, "sample": sample, "turn": 0, "new_tokens": 100}
    values |= {"decode_s": 100 / speed, "tokens_per_s": speed, "mean_accepted": speed / 10}
    return values | more


def run_folder(folder: Path, *lines) -> Path:
    folder.mkdir(parents=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(values) + "\n" for values in lines))
    return folder


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    full = {"accepted": [2, 1], "stage_ms": {"draft": 1.0, "verify": 2.0}, "finish_reason": "stop"}
    folders = []
    for run in ("first", "second"):
        meta = {"meta": {"run": run, "hardware": {"cpu": "<8 cores>"}, "arguments": ["bench", "--fast"]}}
        measured = [
            line(method, budget, speed + sample, sample, dataset, run, temperature, **full)
            for temperature in (0.0, 0.5)
            for method, budget, speed in (("ar", None, 10), ("domino", None, 20), ("dominotree", 16, 30))
            for dataset in ("gsm8k", "alpaca")
            for sample in range(3)
        ]
        variants = [line("dominotree", 16, 20.0 + m, run=run, variant=f"M={m}") for m in (8, 16)]
        folders.append(run_folder(tmp_path_factory.mktemp("runs") / run, meta, *measured, *variants))
    return folders


@pytest.fixture(scope="module")
def made(two_runs, tmp_path_factory):
    return write_report(two_runs, tmp_path_factory.mktemp("report"), resamples=200)


class Page(HTMLParser):
    """Collects the addresses a page would load, its ids and its open tags."""

    def __init__(self):
        super().__init__()
        self.loads, self.ids, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        if tag in ("script", "link", "img", "iframe", "source"):
            self.loads.append(tag)


def test_a_report_is_written_whole(made):
    on_disk = {path.relative_to(made.out) for path in made.out.rglob("*") if path.is_file()}
    assert set(made.files) == on_disk
    assert {
        *(
            "cells.csv",
            "pairwise.csv",
            "variants.csv",
            "ablations.csv",
            "tables.tex",
            "report.md",
            "report.html",
        ),
        *("figures/speedup-T0.5.svg", "figures/speedup-T0.5.png", "figures/speedup-T0.5-dark.png"),
    } <= set(map(str, on_disk))
    assert (made.records, made.runs, made.configurations) == (76, 2, 5)


def test_the_page_loads_nothing_and_its_links_lead_somewhere(made):
    text = (made.out / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.loads == []
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_pictures_of_the_markdown_are_there(made):
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', (made.out / "report.md").read_text())
    assert pictures
    assert all((made.out / picture).is_file() for picture in pictures)


def test_the_report_says_what_was_measured_on_what_and_with_which_command(made, two_runs):
    command = f"dominotree report {two_runs[0]} {two_runs[1]} --out {made.out} --resamples=200"
    for name in ("report.html", "report.md"):
        text = (made.out / name).read_text()
        assert "hardware.cpu" in text
        assert "bench --fast" in text
        assert command in text
        assert "200 resamples, seed 0" in text
    assert "&lt;8 cores&gt;" in (made.out / "report.html").read_text()


def test_the_same_records_give_the_same_files(made, two_runs):
    before = {path: (made.out / path).read_bytes() for path in made.files}
    write_report(two_runs, made.out, resamples=200)
    assert before == {path: (made.out / path).read_bytes() for path in made.files}


def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path):
    folder = run_folder(tmp_path / "run", line("domino", speed=20.0), line("dominotree", 16, 30.0))
    made = write_report([folder], tmp_path / "out")
    assert any("no `ar` records" in note for note in made.notes)
    assert any("No meta record for run 'a'" in note for note in made.notes)
    assert "Calibration: no run folder has a calibration.jsonl." in made.left_out
    text = (tmp_path / "out/report.md").read_text()
    assert all(missing in text for missing in made.left_out)
    assert "| dominotree@16 | –/3.00 |" in text
    assert (tmp_path / "out/figures/speedup-T0.png").is_file()


def test_nothing_of_an_earlier_report_is_left(two_runs, tmp_path):
    out = tmp_path / "out"
    write_report(two_runs, out, resamples=20)
    (out / "figures/mine.svg").write_text("mine")
    made = write_report([run_folder(tmp_path / "run", line(), line("domino", speed=20.0))], out, resamples=20)
    found = {file.relative_to(out) for file in out.rglob("*") if file.is_file()}
    assert found == {*made.files, Path("figures/mine.svg")}


def test_one_prompt_of_one_method_is_enough(tmp_path):
    made = write_report([run_folder(tmp_path / "run", line())], tmp_path / "out")
    assert "Paired differences: no two configurations to compare share a prompt." in made.left_out
    assert (tmp_path / "out/pairwise.csv").read_text().count("\n") == 1


def test_variants_alone_and_names_with_markup_are_fine(tmp_path):
    folder = run_folder(
        tmp_path / "run",
        line(run="<b>", dataset="my|set & <i>", variant="M=8"),
        line("dominotree", 16, 30.0, run="<b>", dataset="my|set & <i>", variant="M=8"),
    )
    write_report([folder], tmp_path / "out")
    text = (tmp_path / "out/report.html").read_text()
    assert "<b>" not in text
    assert "my|set &amp; &lt;i&gt;" in text


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"max_new_tokens": 128}, {"max_new_tokens": 256}, "max_new_tokens"),
        ({"sets": {"gsm8k": {"sha256": "a"}}}, {"sets": {"gsm8k": {"sha256": "b"}}}, "prompts"),
        ({"max_new_tokens": 128, "sets": {"gsm8k": {"sha256": "a"}}}, {"max_new_tokens": 128}, None),
    ],
)
def test_runs_that_were_asked_otherwise_are_not_compared(tmp_path, first, second, what):
    folders = [
        run_folder(
            tmp_path / run,
            {"meta": {"run": run, **meta}},
            *(line(method, run=run, speed=speed) for method, speed in (("ar", 10.0), ("domino", 20.0))),
        )
        for run, meta in (("first", first), ("second", second))
    ]
    made = write_report(folders, tmp_path / "out")
    rows = (tmp_path / "out/pairwise.csv").read_text()
    assert any(f"had other {what}" in note for note in made.notes) == (what is not None)
    assert ("domino,,second,domino,,first" in rows) == (what is None)


def test_models_get_tables_and_figures_of_their_own(tmp_path):
    lines = [
        line(method, budget, speed, run=model, model=model)
        for model in ("x/A", "B")
        for method, budget, speed in (("ar", None, 9.0), ("dominotree", 16, 30.0))
    ]
    made = write_report([run_folder(tmp_path / "run", *lines)], tmp_path / "out")
    assert {"figures/speedup-x-a-T0.svg", "figures/speedup-b-T0.svg"} <= set(map(str, made.files))


def test_bad_input_writes_nothing(tmp_path):
    empty = run_folder(tmp_path / "empty")
    with pytest.raises(InvalidRecord, match="no records"):
        write_report([empty], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    good = run_folder(tmp_path / "run", line())
    with pytest.raises(InvalidReport, match="is a file"):
        write_report([good], good / "records.jsonl")
    with pytest.raises(InvalidReport, match="resamples is 0"):
        write_report([good], tmp_path / "out", resamples=0)


def test_the_command_writes_the_report_and_says_where(two_runs, tmp_path):
    app = typer.Typer()
    app.command("report")(report)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, [*map(str, two_runs), "--out", str(out), "--resamples", "50", "--seed", "2"])
    assert result.exit_code == 0, result.output
    assert f"{out / 'report.html'}" in result.output
    assert "Left out: Calibration" in result.output
    assert "--resamples=50 --seed=2" in (out / "report.md").read_text()
