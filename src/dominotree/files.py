"""Files that are written whole or not at all, and those that weights lie in."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

from dominotree.errors import InvalidCheckpoint, ModelNotFound

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_whole(path: Path, content: str | bytes) -> None:
    """Puts `content` at `path`, text as UTF-8: whoever reads meanwhile sees the old content or the new, never a part.

    Who may read it stays as it was, or is as for any new file. Raises `OSError` where that cannot be done, and leaves
    what was there.
    """
    path = path.resolve()  # a link stays one
    scratch = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        if path.exists():
            shutil.copymode(path, scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def weight_files(folder: Path) -> list[Path]:
    """A model's `model.safetensors`, or without it the shards that the index beside names, in order of their names.

    Raises `ModelNotFound` where there is neither or a shard is missing, `InvalidCheckpoint` for an index that is none.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not index.is_file():
        raise ModelNotFound(f"No weights in {folder}: expected {WEIGHTS}, or {INDEX} with its shards.")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / shard for shard in shards]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(
            f"{index} is no shard index: expected JSON with a weight_map from tensors to files; download the model "
            "again."
        ) from error
    if not files:
        raise InvalidCheckpoint(f"{index} names no weight file: download the model again.")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelNotFound(
            f"{folder} lacks {missing[0]}, named in {INDEX} ({len(missing)} missing in all): copy or download the "
            "model again."
        )
    return files
