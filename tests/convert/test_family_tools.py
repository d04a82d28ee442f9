"""New families among other tools: adapters, caches, and their own layout again without a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import residua
from residua.data.tokenizer import Tokenizer
from residua.export import export
from residua.storage.hugging_face import import_folder
from tests.convert.tiny import FAMILIES, build, logits, tokens
from tests.export.exported import in_transformers

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module", params=["phi3", "qwen3_next", pytest.param("granite", marks=pytest.mark.nightly)])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 in its own layout (`hf`), imported (`run`), and exported with our code (`own`)."""
    home: Path = tmp_path_factory.mktemp("family")
    architecture, keys = FAMILIES[request.param]
    build(architecture, **keys | {"vocab_size": 300}).to(torch.bfloat16).save_pretrained(home / "hf")
    Tokenizer.bytes().save(home / "hf" / "tokenizer.json")
    import_folder(home / "hf", home / "run")
    export(home / "run", home / "own")
    return home


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_export_in_the_original_layout_has_equal_logits(home: Path, tmp_path: Path) -> None:
    theirs = opened(home / "hf")
    export(home / "run", tmp_path / "back", layout=theirs.config.model_type)
    assert torch.equal(logits(opened(tmp_path / "back"), tokens()), logits(theirs, tokens()))


def test_generate_gives_the_same_text_with_and_without_cache(home: Path) -> None:
    ours, given = in_transformers(home / "own", dtype=torch.float32), tokens()[:, :9]
    mask = torch.ones_like(given)
    mask[1, :3] = 0
    written = ours.generate(given, attention_mask=mask, **GREEDY)
    assert torch.equal(written, ours.generate(given, attention_mask=mask, use_cache=False, **GREEDY))
    assert torch.equal(written, opened(home / "hf").generate(given, attention_mask=mask, **GREEDY))


def test_merged_adapter_is_imported_back(home: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    low_rank = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(in_transformers(home / "own", dtype=torch.float32), low_rank)
    merged = adapted.merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    import_folder(tmp_path / "merged", tmp_path / "again")
    expected = logits(merged, tokens())
    assert (expected - logits(residua.load(home / "run"), tokens())).abs().max() > 0.1
    torch.testing.assert_close(logits(residua.load(tmp_path / "again"), tokens()), expected, rtol=0, atol=1e-5)
