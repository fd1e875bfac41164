import csv
import io

import pytest

from dominotree.bench import tables
from dominotree.bench.records import Record
from dominotree.bench.statistics import ablation_pairs, cells, collect, compare, default_pairs
from dominotree.bench.tables import MissingData, Table


def record(method, budget=None, speed=10.0, sample=0, dataset="gsm8k", run="a", **more):
    return Record(run, "m", method, budget, dataset, 0.0, sample, 0, 100, 100 / speed, speed, 2.0, **more)


@pytest.fixture
def series():
    return collect(
        [record("ar", sample=i) for i in range(4)]
        + [record("ddtree", 16, 30.0 + i, sample=i) for i in range(4)]
        + [record("dominotree", 16, 50.0 + i, sample=i) for i in range(4)]
        + [record("dominotree", 16, 40.0 + 5 * i, sample=i, variant="M=8") for i in range(4)]
    )


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_cells_csv_has_the_exact_columns_and_no_variants(series):
    text = tables.cells_csv(cells(series))
    assert text.splitlines()[0] == "run,model,temperature,dataset,method,budget,speedup,tau,tokens_per_s,n"
    found = {(row["method"], row["budget"], row["dataset"]): row for row in rows(text)}
    assert len(found) == len(rows(text)) == 3 * 3
    assert found["ar", "", "gsm8k"]["speedup"] == "1.000000"
    assert float(found["dominotree", "16", "math"]["speedup"]) == pytest.approx(5.15)


def test_pairwise_csv_has_the_exact_columns_and_bare_names(series):
    text = tables.pairwise_csv(compare(default_pairs(series)))
    assert text.splitlines()[0] == ("temperature,scope,a,a_budget,a_run,b,b_budget,b_run,n,delta_pct,ci_low,ci_high")
    (row,) = [r for r in rows(text) if (r["a"], r["b"], r["scope"]) == ("dominotree", "ddtree", "overall")]
    assert (row["a_budget"], row["b_budget"], row["n"], row["temperature"]) == ("16", "16", "4", "0.0")
    assert float(row["ci_low"]) <= float(row["delta_pct"]) <= float(row["ci_high"])


def test_variants_have_files_of_their_own(series):
    (variant,) = {row["variant"] for row in rows(tables.variants_csv(cells(series)))}
    assert variant == "M=8"
    (pair,) = {
        (row["a"], row["a_variant"], row["b"], row["b_variant"])
        for row in rows(tables.ablations_csv(compare(ablation_pairs(series))))
    }
    assert pair == ("dominotree", "M=8", "dominotree", "")


def test_blank_numbers_stay_blank():
    found = cells(collect([record("dominotree", 16)]))
    assert {row["speedup"] for row in rows(tables.cells_csv(found))} == {""}
    lone = compare(default_pairs(collect([record("domino"), record("dominotree", 16)])))
    assert {row["ci_low"] for row in rows(tables.pairwise_csv(lone))} == {""}
    assert tables.speed_table(found, "t", "here").rows[0] == ["dominotree@16", "–/2.00", "–/2.00", "–/2.00"]


def test_the_speed_table_shows_methods_by_sets_with_the_best_in_bold(series):
    plain = [c for c in cells(series) if c.configuration.variant is None]
    text = tables.markdown(tables.speed_table(plain, "speedup", "m at T=0"))
    assert "| method | GSM8K | Math | Overall |" in text
    assert "| dominotree@16 | **5.15/2.00** |" in text
    assert "| ddtree@16 | 3.15/2.00 |" in text


def test_rows_name_the_run_only_where_it_is_needed():
    series = collect([record("ar"), record("ar", run="b"), record("dominotree", 16), record("domino", run="b")])
    labels = [row[0] for row in tables.throughput_table(cells(series), "t", "here").rows]
    assert labels == ["ar [a]", "ar [b]", "domino", "dominotree@16"]
    table = tables.pairwise_table(compare(default_pairs(series)), "p", "here")
    assert ["dominotree@16", "domino †"] in [list(row[:2]) for row in table.rows]
    assert "another run" in table.caption


def test_the_pairwise_table_puts_overall_first_and_sure_differences_in_bold(series):
    table = tables.pairwise_table(compare(default_pairs(series)), "pairwise", "m at T=0")
    assert table.head == ["a", "b", "Overall", "Math", "GSM8K"]
    row = [list(r[:2]) for r in table.rows].index(["dominotree@16", "ddtree@16"])
    assert table.rows[row][2].startswith("+63.5 [")
    assert (row, 2) in table.strong


def test_stage_ending_and_variant_tables_say_what_is_missing(series):
    for make in (tables.stage_table, tables.endings_table, tables.tree_size_table):
        with pytest.raises(MissingData, match="no record has"):
            make(series, "t", "here")
    with pytest.raises(MissingData, match="variant"):
        tables.variant_table([c for c in cells(series) if c.configuration.variant is None], "t", "here")
    assert [r[0] for r in tables.variant_table(cells(series), "t", "here").rows] == [
        "dominotree@16",
        "dominotree@16 (M=8)",
    ]
    timed = collect([record("domino", stage_ms={"draft": 1.0, "verify": 3.5}, finish_reason="length")])
    stages = tables.stage_table(timed, "t", "here")
    assert list(stages.rows[0]) == ["domino", "a", "0", "1.00", "3.50", "4.50"]
    ended = tables.endings_table(timed, "t", "here")
    assert list(ended.rows[0]) == ["domino", "a", "0", "1", "0.0", "100.0", "–", "2.00"]
    sized = collect([record("adaptive", nodes=[64, 0, 5, 7], cap=64)])
    assert list(tables.tree_size_table(sized, "t", "here").rows[0])[3:] == ["4", "19.0", "6", "25.0", "25.0"]


def test_markdown_and_latex_escape_what_would_break_them():
    table = Table("t", "50% of a_b", ["method", "x"], [["a|b_c & d", "−1"]], 1, frozenset({(0, 1)}))
    assert "| a\\|b_c & d | **−1** |" in tables.markdown(table)
    text = tables.latex(table)
    assert r"a|b\_c \& d & \textbf{$-$1} \\" in text
    assert r"\caption{50\% of a\_b}" in text
    assert text.count("{") == text.count("}")
