"""The whole protocol of `docs/results/studies/protocol.toml` at toy size: trained, tuned, fitted and shown."""

from pathlib import Path

import pytest
from rich.console import Console

from residua.study import StudyConfig
from residua.study.run_study import run_study
from residua.study.timing import TimingMeasurement
from residua.study.verdicts import joint_sentence
from tests.forked import fork_workers
from tests.study.conftest import changed

pytestmark = pytest.mark.slow
PROTOCOL = Path("docs/results/studies/protocol.toml")
TOY = (
    "train.device=cpu", "train.micro_batch=8", "train.log_every=20", "train.validate_every=20", "train.save_every=1000",
    "train.telemetry=off", "model.context=32", "data.validation_tokens=32",
)  # fmt: skip


def test_the_protocol_runs_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes, three budgets, two variants, two seeds on the embedded corpus, tuned, under one law."""
    fork_workers(monkeypatch)
    monkeypatch.setattr(TimingMeasurement, "measure", lambda *arguments: None)  # `test_timing.py` times steps
    sizes = []
    for layers, width in ((1, 16), (2, 32)):
        shape = f"layers = {layers}\nwidth = {width}\nattention = {{ heads = 2 }}\nffn = {{ hidden = {4 * width} }}"
        sizes.append(tmp_path / f"{layers}x{width}.toml")
        sizes[-1].write_text(f'extends = "tiny"\n\n[model]\n{shape}\n')
    written = StudyConfig.from_toml(PROTOCOL)
    scaling = {**written.scaling.model_dump(exclude_none=True), "sizes": list(map(str, sizes))}
    tune = {**written.tune.model_dump(exclude_none=True), "lr": [1, 2], "share": 0.25}
    study = changed(written, scaling={**scaling, "tokens_per_parameter": 0.15}, tune=tune, set=TOY)
    outcome = run_study(study, tmp_path / "study", Console(quiet=True))
    result = outcome.result
    assert outcome.complete and len(result.runs) == 2 * 3 * 2 * 2
    assert len(result.tuning) == 4 and {len(rate.trials) for rate in result.tuning} == {2}
    batches = [run.tokens for run in result.runs if run.budget == 1.0 and run.seed == 0 and run.variant == "prenorm"]
    assert batches[0] is not None and batches[1] is not None and batches[1] > 1.5 * batches[0]
    assert result.joint is not None and list(result.joint.parameters) == ["1x16.toml", "2x32.toml"]
    page = outcome.report.read_text()
    assert "Over sizes" in page and "Learning rates" in page
    assert "two sizes do not determine" in joint_sentence(result)
