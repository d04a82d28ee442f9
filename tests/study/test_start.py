"""`compare --from`: variants that start from the weights of a run."""

import json
from pathlib import Path

import pytest
import torch

from residua.config.run import RunConfig
from residua.data import Dataset
from residua.storage.load import load, start_changes
from residua.study import StudyConfig
from residua.study.plan import make_plan
from residua.train.start import starting_model
from residua.train.trainer import train
from tests.study.conftest import SMALL
from tests.trained import residua

pytestmark = pytest.mark.slow


def test_every_variant_is_planned_to_start_from_the_weights(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.find("tiny").override([*SMALL, f"data.path='{dataset.path}'", "train.steps=3"])
    train(config, tmp_path / "old")
    base, changes = start_changes(tmp_path / "old")
    variants = ["base", "denseformer", "mgr", "exoformer", "gatednorm"]
    study = StudyConfig(variants=variants, base=base, match={"kind": "none"}, set=[*changes, "model.reader_eps=sum"])
    runs = make_plan(study, tmp_path / "study", dataset).runs
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = load(tmp_path / "old")(tokens)
        for run in runs[: len(variants)]:
            torch.testing.assert_close(starting_model(run.config)(tokens), expected, rtol=0, atol=1e-5)
    options = ["--from", tmp_path / "old", "--out", tmp_path / "study"]
    for given, message in ((["--base", "tiny"], "leave --base and --sizes out"), (["--match", "ffn"], "--match out")):
        capsys.readouterr()
        assert residua(monkeypatch, "compare", "base", "mgr", *given, *options) == 2
        assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_variants_start_from_the_weights_of_a_run(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.find("tiny").override([*SMALL, f"data.path='{dataset.path}'"])
    train(config, tmp_path / "old")
    capsys.readouterr()
    options = ["--from", tmp_path / "old", "--seeds", 1, "--workers", 1, "--out", tmp_path / "study"]
    assert residua(monkeypatch, "compare", "base", "denseformer", "gatednorm", *options) == 0
    starts = {}
    for metrics in (tmp_path / "study").rglob("metrics.jsonl"):
        first = json.loads(metrics.read_text().splitlines()[0])
        assert first["kind"] == "validation" and first["step"] == 0
        starts[metrics.parent.name] = first["loss"]
    assert len(starts) == 3 and max(starts.values()) - min(starts.values()) < 1e-5
