"""The examples of docs/use-in-your-model.md run as written, and train what one process of Residua would."""

from pathlib import Path
from typing import Any

import pytest
import torch

from residua.data import open_corpus, prepare
from tests.docs.test_documentation import python_blocks

pytestmark = pytest.mark.slow

COMMON, TRAINER, ACCELERATE = range(2, 5)


@pytest.fixture
def page(tmp_path: Path, monkeypatch) -> dict[str, Any]:
    """The names that the common block defines, with a small text at the path of the page; its model is tiny."""
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text("the depth axis of transformers, again and again. " * 40)
    prepare(open_corpus([tmp_path / "texts"], holdout=0.2), tmp_path / "data/mine", "bytes", workers=1)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(python_blocks("use-in-your-model.md")[COMMON], scope)
    scope["config"] = scope["config"].override(["layers=2", "width=32", "attention.heads=2", "ffn.hidden=32"])
    return scope


def run(page: dict[str, Any], number: int) -> list[float]:
    """Execute a block; returns the losses of its micro-batches."""
    losses: list[float] = []
    forward = page["LanguageModel"].forward

    def recorded(model: Any, input_ids: Any, labels: Any) -> Any:
        made = forward(model, input_ids, labels)
        losses.append(float(made["loss"].detach()))
        return made

    page["LanguageModel"].forward = recorded
    torch.manual_seed(0)
    exec(python_blocks("use-in-your-model.md")[number], page)
    return losses


def by_hand(page: dict[str, Any], steps: int) -> list[float]:
    """The same steps in a loop of our own: two micro-batches of four, clipped, at the full rate."""
    torch.manual_seed(0)
    model = page["LanguageModel"](page["config"])
    optimizer = page["build_optimizer"](model, page["Muon"](lr=0.01))
    batches, losses = iter(page["DataLoader"](page["windows"], batch_size=4)), []
    for _ in range(steps):
        for _ in range(2):
            loss = model(**next(batches))["loss"]
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_accelerate_trains_like_a_manual_loop(page: dict[str, Any]) -> None:
    pytest.importorskip("accelerate", reason="accelerate is in the extra hf")
    expected = by_hand(page, 10)
    assert run(page, ACCELERATE) == pytest.approx(expected, rel=1e-4)
    assert list(Path("out/accelerate").glob("*.safetensors"))


@pytest.mark.nightly
def test_the_transformers_trainer_trains(page: dict[str, Any]) -> None:
    """Its scheduler lowers the rate, so only the first step is that of the loop by hand."""
    pytest.importorskip("transformers", reason="transformers is in the extra hf")
    expected = by_hand(page, 1)
    losses = run(page, TRAINER)
    assert len(losses) == 40 and losses[:2] == pytest.approx(expected, rel=1e-4)
    assert sum(losses[-4:]) < sum(losses[:4])
