"""`dominotree profile`: every drafter of the pair is measured, so that each cost-aware method finds its costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Run


def test_every_cost_aware_method_runs_after_one_profile(
    run: Run, bare: Run, model: Path, dflash_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    both = ("--dflash-drafter", dflash_drafter)
    methods = {"caddtree": both, "condadaptive": (), "adaptive": ()}
    for method, options in methods.items():
        result = run("generate", "hello", *options, "--method", method, "--max-new-tokens", 4)
        assert result.exit_code == 2 and "dominotree profile" in result.stderr
    for contexts, named in (("8,x", "integers"), ("0,8", "at least 1"), ("8,100000", "at most")):
        result = run("profile", "--contexts", contexts)
        assert result.exit_code == 2 and named in result.stderr
    for plot, named in (("costs.pdf", ".svg or .png"), (tmp_path / "none" / "costs.svg", "does not exist")):
        result = run("profile", "--plot", plot)
        assert result.exit_code == 2 and named in result.stderr
    assert not (tmp_path / "profiles").exists()
    result = run("profile", *both, "--repeats", 1, "--contexts", "8,64,32", "--plot", tmp_path / "costs.svg")
    assert result.exit_code == 0, result.output
    assert "8 tokens" in result.stdout and "64 tokens" in result.stdout
    assert "Domino drafter, ms" in result.stdout and "DFlash drafter, ms" in result.stdout
    assert len(list((tmp_path / "profiles").iterdir())) == 2
    assert "<svg" in (tmp_path / "costs.svg").read_text()
    only_target = ("--target", model, "--drafter", "none", "--dtype", "float32")
    plain = bare("generate", "hello", *only_target, "--max-new-tokens", 12)
    assert plain.exit_code == 0, plain.output
    for method, options in methods.items():
        result = run("generate", "hello", *options, "--method", method, "--max-new-tokens", 12)
        assert result.exit_code == 0, result.output
        assert result.stdout == plain.stdout
