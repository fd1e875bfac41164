"""Drafter folders: nothing missing, nothing left over, nothing changed on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dominotree.drafters.checkpoint import (
    check_fits_target,
    draft_token_ids,
    expected_shapes,
    read_checkpoint,
    write_checkpoint,
)
from dominotree.errors import DominoTreeError, InvalidCheckpoint, ModelNotFound, UnsupportedModel
from drafters.synthetic import tiny_config, tiny_tensors, write_tiny_drafter

BOOTSTRAP = Path(__file__).parents[3] / "shared" / "data" / "drafter-bootstrap"


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of the folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("projector", ["domino", None])
@pytest.mark.parametrize("draft_vocab", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_identical(
    tmp_path: Path, projector: str | None, draft_vocab: int | None, dtype: torch.dtype
) -> None:
    config = tiny_config(projector=projector, draft_vocab=draft_vocab)
    tensors = tiny_tensors(config, dtype=dtype)
    write_checkpoint(tmp_path / "one", config, tensors)
    read_config, read = read_checkpoint(tmp_path / "one")
    assert read_config == config
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    write_checkpoint(tmp_path / "two", read_config, read)
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "two").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # whoever may read one may read both
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_prefixes_are_stripped_and_rotary_buffers_ignored(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path, attention_bias=True)
    _, plain = read_checkpoint(tmp_path)
    head = ("prefix_gru", "embed_proj")
    prefixed = {("logit_head." if name.startswith(head) else "model.") + name: t for name, t in plain.items()}
    prefixed["model.rotary_emb.inv_freq"] = torch.ones(4)
    prefixed["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(prefixed, tmp_path / "model.safetensors")
    _, read = read_checkpoint(tmp_path)
    assert read.keys() == plain.keys()
    assert all(torch.equal(read[name], plain[name]) for name in plain)


def test_shards_are_joined_and_a_lost_one_is_named(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path)
    _, whole = read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: whole[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, read = read_checkpoint(tmp_path)
    assert all(torch.equal(read[name], whole[name]) for name in whole)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"b\.safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["prefix_gru.weight_hh_l0", "embed_proj.2.weight", "fc.weight", "layers.1.mlp.up_proj.weight", "t2d"],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_tiny_drafter(tmp_path, draft_vocab=40)
    rewrite(tmp_path, {name: None})
    with pytest.raises(InvalidCheckpoint, match=f"{name} is missing") as refusal:
        read_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.7.mlp.up_proj.weight", "d2t"])
def test_an_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_tiny_drafter(tmp_path)
    rewrite(tmp_path, {name: torch.ones(3)})
    with pytest.raises(InvalidCheckpoint, match=f"{name} is unexpected"):
        read_checkpoint(tmp_path)


def test_head_tensors_without_a_projector_are_unexpected(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(projector=None).to_dict()))
    with pytest.raises(InvalidCheckpoint, match=r"embed_proj\.0\.weight"):
        read_checkpoint(tmp_path)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path)
    rewrite(tmp_path, {"model.norm.weight": torch.ones(32)})
    with pytest.raises(InvalidCheckpoint, match=r"norm\.weight is there twice"):
        read_checkpoint(tmp_path)


def test_every_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path / "good", draft_vocab=40, attention_bias=True)
    config, good = read_checkpoint(tmp_path / "good")
    for name, shape in expected_shapes(config).items():
        wrong = torch.zeros(*shape[:-1], shape[-1] + 1, dtype=good[name].dtype)
        with pytest.raises(InvalidCheckpoint, match=name):
            write_checkpoint(tmp_path / "bad", config, good | {name: wrong})
    assert not (tmp_path / "bad").exists()


def test_the_vocabulary_maps_are_never_cast(tmp_path: Path) -> None:
    config = tiny_config(draft_vocab=40)
    tensors = tiny_tensors(config, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, config, tensors)
    _, read = read_checkpoint(tmp_path)
    assert (read["d2t"].dtype, read["t2d"].dtype) == (torch.int64, torch.bool)
    for name in ("d2t", "t2d"):
        with pytest.raises(InvalidCheckpoint, match=name):
            write_checkpoint(tmp_path, config, tensors | {name: tensors[name].to(torch.bfloat16)})


@pytest.mark.parametrize("kind", ["repeated", "beyond", "negative", "other tokens"])
def test_vocabulary_maps_that_disagree_are_refused(tmp_path: Path, kind: str) -> None:
    config = tiny_config(draft_vocab=40)
    tensors = tiny_tensors(config)
    d2t, t2d = tensors["d2t"].clone(), tensors["t2d"].clone()
    if kind == "repeated":
        d2t[5] = d2t[4] - 1
    elif kind == "beyond":
        d2t[-1] = config.vocab_size
    elif kind == "negative":
        d2t[0] = -1
    else:
        t2d = t2d.roll(1)
    with pytest.raises(InvalidCheckpoint, match="t2d" if kind == "other tokens" else "d2t"):
        write_checkpoint(tmp_path, config, tensors | {"d2t": d2t, "t2d": t2d})


def test_draft_token_ids_are_offsets_undone() -> None:
    tensors = tiny_tensors(tiny_config(draft_vocab=40), keep=(0, 1, 95))
    ids = draft_token_ids(tensors)
    assert ids is not None
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    assert {0, 1, 95} <= set(ids.tolist())
    assert draft_token_ids(tiny_tensors(tiny_config())) is None


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path)
    rewrite(tmp_path, {"norm.weight": torch.ones(32).to(torch.float8_e4m3fn)})
    with pytest.raises(UnsupportedModel, match=r"norm\.weight"):
        read_checkpoint(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path)
    rewrite(tmp_path, {"norm.weight": torch.ones(32, dtype=torch.int64)})
    with pytest.raises(InvalidCheckpoint, match=r"norm\.weight"):
        read_checkpoint(tmp_path)


def test_a_damaged_weight_file_is_refused(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors"):
        read_checkpoint(tmp_path)


def test_a_folder_without_weights_is_no_drafter(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        read_checkpoint(tmp_path)


def test_writing_replaces_the_drafter_and_keeps_its_neighbours(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path / "d", seed=0)
    (tmp_path / "d" / "README.md").write_text("card")
    write_tiny_drafter(tmp_path / "d", seed=1)
    _, read = read_checkpoint(tmp_path / "d")
    assert torch.equal(read["fc.weight"], tiny_tensors(tiny_config(), seed=1)["fc.weight"])
    assert (tmp_path / "d" / "README.md").read_text() == "card"
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]


FITS = {"hidden_size": 32, "vocab_size": 96, "num_layers": 4}


def test_a_fitting_drafter_passes() -> None:
    config = tiny_config(draft_vocab=40)
    check_fits_target(config, **FITS, stop_token_ids=[1, 2], draft_tokens=draft_token_ids(tiny_tensors(config)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"hidden_size": 64}, "hidden_size is 32, the target has 64"),
        ({"vocab_size": 100}, "vocab_size is 96, the target has 100"),
        ({"num_layers": 6}, "num_target_layers is 4, the target has 6"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_sizes(other: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=named):
        check_fits_target(tiny_config(), **{**FITS, **other})


def test_a_tapped_layer_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match="target_layer_ids"):
        check_fits_target(tiny_config(layer_ids=(0, 4)), **FITS)


def test_a_mask_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match="mask_token_id"):
        check_fits_target(tiny_config(mask_token=96), **FITS)


def test_vocabularies_padded_differently_pass_only_if_both_hold_the_tokenizer() -> None:
    config = tiny_config(vocab=112)
    sizes = {**FITS, "vocab_size": 128}
    check_fits_target(config, **sizes, tokenizer_size=105)
    with pytest.raises(InvalidCheckpoint, match=r"112.*128"):
        check_fits_target(config, **sizes, tokenizer_size=120)
    with pytest.raises(InvalidCheckpoint, match=r"112.*128"):
        check_fits_target(config, **sizes)


def test_a_draft_vocabulary_without_a_stop_token_is_refused() -> None:
    config = tiny_config(draft_vocab=40)
    ids = draft_token_ids(tiny_tensors(config, keep=(0, 1)))
    assert ids is not None
    left_out = next(i for i in range(96) if i not in ids)
    with pytest.raises(InvalidCheckpoint, match=f"stop token {left_out}"):
        check_fits_target(config, **FITS, stop_token_ids=[left_out], draft_tokens=ids)


def test_every_refusal_is_of_the_packages_own_kind() -> None:
    assert issubclass(InvalidCheckpoint, DominoTreeError)


@pytest.mark.skipif(not BOOTSTRAP.exists(), reason="shared/data/drafter-bootstrap is not here")
def test_the_bootstrap_drafter_loads_and_is_written_back_unchanged(tmp_path: Path) -> None:
    config, tensors = read_checkpoint(BOOTSTRAP)
    assert (config.draft_length, config.is_domino, config.draft_vocab_size) == (8, True, 8192)
    check_fits_target(
        config,
        hidden_size=576,
        vocab_size=49152,
        num_layers=30,
        stop_token_ids=[2],
        draft_tokens=draft_token_ids(tensors),
    )
    write_checkpoint(tmp_path / "copy", config, tensors)
    _, again = read_checkpoint(tmp_path / "copy")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
