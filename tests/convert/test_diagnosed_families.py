"""Imported families under `diagnose`: our model gives the numbers of its Hugging Face path."""

from pathlib import Path
from typing import Any

import pytest
import torch

from residua.data.tokenizer import Tokenizer
from residua.diagnose import diagnose
from residua.storage.hugging_face import import_folder
from tests.convert.tiny import FAMILIES, saved

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
SHARED = ("states", "sites", "attention")


def numbers(value: Any) -> list[float]:
    """Every number of a fact, in order.

    Gradients are left out: a sublayer of ours has its norm, and the Hugging Face path counts the body alone.
    """
    if isinstance(value, dict):
        return [number for key, each in value.items() if key != "gradient_rms" for number in numbers(each)]
    if isinstance(value, list | tuple):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize("name", ["smollm3", "phi3", "gemma4, keys as values"])
def test_imported_family_has_the_diagnosis_of_its_folder(name: str, tmp_path: Path) -> None:
    architecture, keys = FAMILIES[name]
    saved(tmp_path / "hf", architecture, **keys | {"vocab_size": 300})
    Tokenizer.bytes().save(tmp_path / "hf" / "tokenizer.json")
    import_folder(tmp_path / "hf", tmp_path / "run")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    settings: dict[str, Any] = {"text": tmp_path / "text.txt", "tokens": 128, "length": 32, "device": "cpu"}
    theirs, ours = diagnose([tmp_path / "hf", tmp_path / "run"], tmp_path / "out", **settings).models
    assert theirs.loss == pytest.approx(ours.loss, rel=1e-6)
    for key in SHARED:
        first, second = (numbers(made.model_dump()[key]) for made in (theirs, ours))
        assert first
        torch.testing.assert_close(torch.tensor(second), torch.tensor(first), rtol=1e-4, atol=1e-5)
    removed = [[a.loss for a in made.ablations] for made in (theirs, ours)]
    torch.testing.assert_close(*(torch.tensor(losses) for losses in removed), rtol=1e-5, atol=0)
