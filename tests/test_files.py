"""Files are written whole, for whom they were before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dominotree.files import write_whole


def test_a_new_file_obeys_the_umask_and_an_old_one_stays_as_it_was(tmp_path: Path) -> None:
    file, link = tmp_path / "one", tmp_path / "link"
    link.symlink_to(file)
    before = os.umask(0o077)
    try:
        write_whole(file, "é")
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o640)
        write_whole(link, b"two")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.read_bytes() == b"two" and link.is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"one", "link"}


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "one"
    write_whole(file, "before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "after")
    assert file.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["one"]
