"""Every verb that opens a model, with every kind that a variant names."""

import json
from pathlib import Path
from typing import Any

import pytest

from residua.config.run import RunConfig
from residua.config.variants import KNOWN, changed
from tests.trained import SMALL, prepare_words, residua

pytestmark = pytest.mark.nightly
COMBINED = ("hc_cyclic", "gated_value+gated_attention", "value_embeddings+loop", "mudd+value_embeddings+xsa", "sink")


def kinds_in(table: dict[str, Any], path: str = "model") -> set[str]:
    """Every kind that a model consists of, with its place."""
    tables = (kinds_in(value, f"{path}.{key}") for key, value in table.items() if isinstance(value, dict))
    return {f"{path}.kind={table.get('kind')}"}.union(*tables)


def one_name_per_kind() -> list[str]:
    """The names of variants that bring a kind which no earlier name has."""
    base, names, seen = RunConfig.find("mini"), [], set[str]()
    for name in KNOWN:
        kinds = kinds_in(changed(base, [name]).model.model_dump())
        if kinds - seen:
            names.append(name)
        seen |= kinds
    return names


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_words(tmp_path_factory.mktemp("words"), words=120)


@pytest.mark.parametrize("kind", [*one_name_per_kind(), *COMBINED])
def test_every_verb_accepts_every_kind(kind: str, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, few = tmp_path / "run", ("--calibration", 4, "--tokens", 64, "--probes", 0)
    recipe = {"steps": 2, "micro_batch": 2, "device": "cpu", "schedule": {"kind": "cosine", "warmup": 1}}
    config = RunConfig(model=SMALL | {"layers": 4}, data={"path": str(words), "validation_tokens": 64}, train=recipe)
    (tmp_path / "config.toml").write_text(changed(config, [kind]).to_toml())

    def losses(folder: Path) -> float:
        file = tmp_path / f"{folder.name}.json"
        assert residua(monkeypatch, "eval", folder, "--data", words, "--tokens", 64, "--out", file) == 0
        return float(json.loads(file.read_text())["text"]["loss"])

    for arguments in (
        ("train", tmp_path / "config.toml", "--out", run),
        ("train", "--resume", "--out", run, "train.steps=4"),
        ("generate", run, "--prompt", "depth is", "--tokens", 4),
        ("diagnose", run, "--tokens", 32, "--ablation-tokens", 32, "--out", tmp_path / "diagnosis"),
        ("quantize", run, "--scheme", "fp8", "--out", tmp_path / "fp8", *few),
        ("quantize", run, "--scheme", "nvfp4", "--smooth", 0.5, "--inside", "--out", tmp_path / "nvfp4", *few),
        ("export", run, "--out", tmp_path / "exported"),
        ("import", tmp_path / "exported", "--out", tmp_path / "imported"),
        ("bench", "plan", tmp_path / "config.toml", "--gpus", 2, "train.accumulate=4"),
        ("bench", "step", tmp_path / "config.toml", "--steps", 1, "--warmup", 0),
    ):
        assert residua(monkeypatch, *arguments) == 0, arguments
    assert losses(tmp_path / "imported") == losses(tmp_path / "exported") == losses(run)
