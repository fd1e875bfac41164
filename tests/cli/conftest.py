"""A tiny random pair on disk, and the command to run on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from dominotree.cli import app
from drafters.synthetic import write_tiny_drafter
from targets.tiny import tiny_model

SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|mask|>")
TEMPLATE = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}\n{% endfor %}<|user|>assistant: "
VOCAB = 264


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that every emoji spans four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random target that speaks bytes."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=4096).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>", "eos_token": "<|end|>"}')
    return folder


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Domino drafter for it."""
    return write_tiny_drafter(tmp_path_factory.mktemp("domino"), vocab=VOCAB)


@pytest.fixture(scope="session")
def dflash_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random plain DFlash drafter for it."""
    return write_tiny_drafter(tmp_path_factory.mktemp("dflash"), vocab=VOCAB, projector=None)


Run = Callable[..., Result]


@pytest.fixture
def bare() -> Run:
    """Runs the command with exactly the arguments given."""

    def run(*args: object, input: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args], input=input)

    return run


@pytest.fixture
def run(bare: Run, model: Path, drafter: Path) -> Run:
    """Runs a command on the tiny pair in fp32."""

    def run(command: str, *args: object, input: str | bytes | None = None) -> Result:
        return bare(command, "--target", model, "--drafter", drafter, "--dtype", "float32", *args, input=input)

    return run
