"""Exports are written as a stream, in files of a given size: memory holds a tensor, not the model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import residua
from residua.data.tokenizer import Tokenizer
from residua.errors import UserError
from residua.export import export, parse_size
from residua.storage.hugging_face import import_folder
from tests.convert.tiny import logits, saved, tokens
from tests.storage.large import STATUS, peak, write_llama
from tests.trained import residua as command

pytest.importorskip("transformers")
LIMIT = 30_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A tiny imported Llama, with gains away from 1."""
    saved(tmp_path / "hf", "Llama", vocab_size=300)
    Tokenizer.bytes().save(tmp_path / "hf" / "tokenizer.json")
    import_folder(tmp_path / "hf", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["residua", "llama"])
def test_shards_open_in_transformers_and_residua(
    layout: str, run: Path, tmp_path: Path, monkeypatch, copied_code
) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    assert command(monkeypatch, "export", run, "--out", out, "--layout", layout, "--max-shard-size", "30KB") == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert len(files) > 2 and files.keys() == set(index["weight_map"].values())
    sizes = {name: sum(t.nbytes for t in tensors.values()) for name, tensors in files.items()}
    assert all(sizes[name] <= LIMIT or len(files[name]) == 1 for name in files)
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    expected = logits(residua.load(run), tokens())
    assert torch.equal(logits(residua.load(out), tokens()), expected)
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    torch.testing.assert_close(logits(theirs, tokens()), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("layout", ["residua", "llama"])
def test_export_takes_less_memory_than_its_weights(layout: str, tmp_path: Path, monkeypatch) -> None:
    """The largest matrix has a tenth of the weights, and takes twice as much in float32."""
    monkeypatch.setattr("residua.export.check.free_memory", lambda: 2**20)
    sizes = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    total = write_llama(tmp_path / "hf", num_attention_heads=16, **sizes)
    Tokenizer.bytes().save(tmp_path / "hf" / "tokenizer.json")
    import_folder(tmp_path / "hf", tmp_path / "run")
    out = tmp_path / "out"
    taken = peak(lambda: export(tmp_path / "run", out, layout=layout, max_shard_size="40MB"))
    assert len(list(out.glob("*.safetensors"))) > 2
    assert total > 100 * 2**20 and 0.05 < taken / total < 0.5


@pytest.mark.slow
def test_model_too_large_to_check_is_exported_untested(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("residua.export.check.free_memory", lambda: 2**18)
    monkeypatch.setattr("residua.storage.load.load", lambda *_: pytest.fail("the whole model was opened"))
    assert command(monkeypatch, "export", run, "--out", tmp_path / "out", "--layout", "llama") == 0
    reason = r"was not tested: that needs 0\.[4-9] MiB of memory, but this machine has 0\.2 MiB free\."
    assert re.search(f"The exported code {reason}", capsys.readouterr().out)
    assert torch.equal(logits(residua.load(tmp_path / "out"), tokens()), logits(residua.load(run), tokens()))


def test_sharded_checkpoint_can_be_exported(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "one", layout="llama")
    step = run / "checkpoints" / "step-0"
    content = load_file(step / "model.safetensors")
    (step / "shards").mkdir()
    save_file(content, step / "shards" / "shard-1.safetensors")
    (step / "model.safetensors").unlink()
    export(run, tmp_path / "several", layout="llama")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "several"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.slow
def test_non_finite_weight_is_refused(run: Path, tmp_path: Path) -> None:
    file = run / "checkpoints" / "step-0" / "model.safetensors"
    content = load_file(file)
    shutil.copytree(file.parent, file.parent.with_name("step-1"))
    content["norm.weight"][3] = float("nan")
    save_file(content, file.parent.with_name("step-1") / "model.safetensors")
    with pytest.raises(UserError, match=r"step-1: weight norm\.weight is not finite .*step-0, which is finite\.$"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shard_sizes_accept_decimal_and_binary_units() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MiB", "200b")] == [5 * 10**9, 3 * 2**19, 200]
    for text in ("5", "many", "0GB", "GB", f"{10**400}GB"):
        with pytest.raises(UserError, match=f"--max-shard-size {text} is not a size: write 5GB or 500MB"):
            parse_size(text)
