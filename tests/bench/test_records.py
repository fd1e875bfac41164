import json
import math
from pathlib import Path

import pytest

from dominotree.bench.records import InvalidRecord, Record, RecordWriter, read_records

LINE = {
    "run": "a",
    "model": "m",
    "method": "dominotree",
    "budget": 16,
    "dataset": "gsm8k",
    "temperature": 0.0,
    "sample": 0,
    "turn": 0,
    "new_tokens": 100,
    "decode_s": 2.0,
    "tokens_per_s": 50.0,
    "mean_accepted": 4.0,
}


def line(**changes):
    return json.dumps(LINE | changes)


def written(folder: Path, *lines: str, name: str = "records.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(text + "\n" for text in lines))
    return folder


def test_record_survives_writing_and_reading_with_optional_and_unknown_fields(tmp_path):
    record = Record.from_json(
        LINE | {"accepted": [3, 5], "stage_ms": {"draft": 1.5}, "variant": "M=16", "note": {"x": 1}}
    )
    with RecordWriter(tmp_path / "run" / "records.jsonl") as writer:
        writer.write_meta({"run": "a", "threads": 8})
        writer.write(record)
    found = read_records([tmp_path / "run"])
    assert found.records == (record,)
    assert found.records[0].extra == {"note": {"x": 1}}
    assert found.records[0].rounds is None
    assert found.metas[0].runs == ("a",)
    assert found.metas[0].values["threads"] == 8


def test_null_budget_and_null_optional_fields_are_absent(tmp_path):
    found = read_records([written(tmp_path, line(budget=None, finish_reason=None))])
    assert found.records[0].budget is None
    assert "finish_reason" not in found.records[0].to_json()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("tokens_per_s", math.nan, "finite number"),
        ("decode_s", math.inf, "finite number"),
        ("mean_accepted", -1, "0 or more"),
        ("new_tokens", 1.5, "whole number"),
        ("new_tokens", True, "whole number"),
        ("budget", "16", "or null"),
        ("run", "", "non-empty string"),
        ("accepted", [1, -1], "list of whole numbers"),
        ("stage_ms", {"draft": math.nan}, "milliseconds per round"),
    ],
)
def test_a_bad_field_is_refused_with_file_line_field_and_expectation(tmp_path, field, value, expected):
    folder = written(tmp_path, line(), "", line(**{"sample": 1, field: value}))
    with pytest.raises(InvalidRecord, match=rf"records\.jsonl:3: field '{field}'.*{expected}"):
        read_records([folder])


def test_a_missing_field_and_a_line_that_is_no_object_are_refused(tmp_path):
    values = {name: value for name, value in LINE.items() if name != "sample"}
    with pytest.raises(InvalidRecord, match=r":1: field 'sample' is missing, expected a whole number"):
        read_records([written(tmp_path / "a", json.dumps(values))])
    with pytest.raises(InvalidRecord, match=r":1: a JSON list, expected one JSON object"):
        read_records([written(tmp_path / "b", "[1]")])
    with pytest.raises(InvalidRecord, match=r":1: field 'meta' is int, expected an object"):
        read_records([written(tmp_path / "c", '{"meta": 3}')])


def test_a_torn_last_line_is_refused_by_the_reader_with_what_to_do(tmp_path):
    (tmp_path / "records.jsonl").write_text(line() + "\n" + line(sample=1)[:40])
    with pytest.raises(InvalidRecord, match=r":2: not JSON.*resume the run"):
        read_records([tmp_path])


@pytest.mark.parametrize("tail", ['{"run": "a", "mod', '{"run": "a", "mod\n', "\x00\x00\x00"])
def test_the_writer_removes_a_torn_last_line_and_resumes(tmp_path, tail):
    path = tmp_path / "records.jsonl"
    path.write_text(line() + "\n" + tail)
    with RecordWriter(path) as writer:
        assert "cut off" in writer.repaired
        assert writer.done == {Record.from_json(LINE).key}
        writer.write(Record.from_json(LINE | {"sample": 1}))
    assert [record.sample for record in read_records([path]).records] == [0, 1]


def test_the_writer_ends_a_complete_line_that_lacks_its_newline(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(line())
    with RecordWriter(path) as writer:
        assert writer.repaired is None
        writer.write(Record.from_json(LINE | {"sample": 1}))
    assert len(read_records([path]).records) == 2


def test_the_writer_repairs_a_file_that_is_one_torn_line(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"run"')
    with RecordWriter(path) as writer:
        assert writer.done == set()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("lines", [('{"run": "a"', line()), (line(), line(sample=1, decode_s=-1))])
def test_the_writer_refuses_a_malformed_line_that_is_not_torn(tmp_path, lines):
    folder = written(tmp_path, *lines)
    before = (folder / "records.jsonl").read_bytes()
    with pytest.raises(InvalidRecord, match=r"records\.jsonl:[12]"):
        RecordWriter(folder / "records.jsonl")
    assert (folder / "records.jsonl").read_bytes() == before


def test_every_record_is_on_disk_when_write_returns(tmp_path):
    writer = RecordWriter(tmp_path / "records.jsonl")
    writer.write(Record.from_json(LINE))
    assert len(read_records([tmp_path]).records) == 1
    writer.close()


def test_a_prompt_is_written_and_read_once(tmp_path):
    path = tmp_path / "a" / "records.jsonl"
    with RecordWriter(path) as writer:
        writer.write(Record.from_json(LINE))
        with pytest.raises(InvalidRecord, match="already holds"):
            writer.write(Record.from_json(LINE))
    assert len(read_records([path, path.parent]).records) == 1
    written(tmp_path / "b", line())
    with pytest.raises(InvalidRecord, match=r"read before, at records\.jsonl:1.*different names"):
        read_records([tmp_path / "a", tmp_path / "b"])


def test_the_same_meta_is_written_once(tmp_path):
    for _ in range(2):
        with RecordWriter(tmp_path / "records.jsonl") as writer:
            writer.write_meta({"seed": 0, "arguments": ("x",)})
    assert (tmp_path / "records.jsonl").read_text().count("meta") == 1


def test_nothing_to_read_is_a_clear_line(tmp_path):
    with pytest.raises(InvalidRecord, match="does not exist"):
        read_records([tmp_path / "absent"])
    with pytest.raises(InvalidRecord, match=r"no \.jsonl file"):
        read_records([tmp_path])
    written(tmp_path / "runs" / "one", line())
    with pytest.raises(InvalidRecord, match="its folders one do"):
        read_records([tmp_path / "runs"])
    with pytest.raises(InvalidRecord, match="at least one run folder"):
        read_records([])
    with pytest.raises(InvalidRecord, match="at least one line with a measured prompt"):
        read_records([written(tmp_path / "empty", '{"meta": {}}')])


def test_calibration_is_read_as_bins_or_as_single_nodes(tmp_path):
    written(tmp_path, line())
    written(
        tmp_path,
        '{"depth": 0, "bin_low": 0.5, "bin_high": 0.6, "n": 9, "mean_predicted": 0.55, "accepted_rate": 0.4}',
        '{"depth": 1, "predicted": 0.91, "accepted": true}',
        '{"depth": 1, "predicted": 0.97, "accepted": 0}',
        name="calibration.jsonl",
    )
    given, made = read_records([tmp_path]).calibration
    assert (given.label, given.depth, given.n, given.accepted_rate) == ("a", 0, 9, 0.4)
    assert (made.depth, made.n, made.accepted_rate) == (1, 2, 0.5)
    assert made.mean_predicted == pytest.approx(0.94)
    written(tmp_path, '{"depth": 0, "predicted": 1.5, "accepted": 1}', name="calibration.jsonl")
    with pytest.raises(InvalidRecord, match=r"calibration\.jsonl:1: field 'predicted' is 1\.5, expected a prob"):
        read_records([tmp_path])
