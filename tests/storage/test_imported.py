"""Folders of transformers: copied files, models in several files, memory, and the commands on a run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from residua.cli.main import app
from residua.config.run import RunConfig
from residua.data import open_corpus, prepare
from residua.data.tokenizer import Tokenizer
from residua.export import export
from residua.generate.generator import Generator, Request
from residua.quantize.run import stored_bytes
from residua.storage.hugging_face import import_folder
from residua.storage.load import load
from residua.storage.model_folder import open_model
from residua.storage.run import Run
from residua.storage.tensors import Entry, write_tensors
from tests.convert.tiny import logits, saved, tokens
from tests.storage.large import STATUS, peak, write_llama

pytest.importorskip("transformers")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Qwen 3 in bfloat16 with a tokenizer, a chat template and generation settings."""
    path = tmp_path / "hf"
    model = saved(path, "Qwen3", vocab_size=300, head_dim=16)
    model.to(torch.bfloat16).save_pretrained(path)
    Tokenizer.bytes().save(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    return path


@pytest.mark.slow
def test_tokenizer_template_and_settings_survive_a_round_trip(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made = import_folder(folder, tmp_path / "run")
    assert made.model_type == "qwen3" and made.has_tokenizer
    _, tokenizer = open_model(tmp_path / "run")
    assert tokenizer.decode(tokenizer.encode("wörld")) == "wörld"
    export(tmp_path / "run", tmp_path / "back", layout="qwen3", precision="bfloat16")
    export(tmp_path / "run", tmp_path / "own", precision="bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    for exported in ("back", "own"):
        theirs = AutoTokenizer.from_pretrained(tmp_path / exported)
        assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    config, before = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "back", folder))
    assert {key: config.get(key) for key in before} == before


@pytest.mark.slow
def test_imported_weights_keep_their_precision(folder: Path, tmp_path: Path) -> None:
    made = import_folder(folder, tmp_path / "run")
    stored = load_file(tmp_path / "run" / "checkpoints" / "step-0" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert made.bytes == sum(tensor.numel() * 2 for tensor in stored.values()) == 2 * made.parameters
    model = load(tmp_path / "run")
    assert next(model.parameters()).dtype == torch.float32
    assert stored_bytes(tmp_path / "run", model) == made.bytes


def test_import_refuses_a_run_and_names_a_missing_folder(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "run")
    with pytest.raises(ValueError, match=f"{tmp_path / 'run'} is already a run: use it directly"):
        import_folder(tmp_path / "run", tmp_path / "again")
    with pytest.raises(ValueError, match=f"{tmp_path / 'lost'} is not a folder: name a Hugging Face model folder"):
        import_folder(tmp_path / "lost", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", ["Qwen3", "Llama", "Gemma3"])
def test_export_without_a_precision_keeps_stored_dtypes(architecture: str, dtype, tmp_path) -> None:
    model = saved(tmp_path / "hf", architecture, vocab_size=300, num_hidden_layers=1).to(dtype)
    model.save_pretrained(tmp_path / "hf")
    Tokenizer.bytes().save(tmp_path / "hf" / "tokenizer.json")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    before["model.norm.weight"] = torch.full((32,), 1 / 3) + torch.rand(32)  # in float32, regardless of the others
    save_file(before, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    import_folder(tmp_path / "hf", tmp_path / "run")
    name = str(dtype).removeprefix("torch.")
    for number, source in enumerate((tmp_path / "run", tmp_path / "hf")):
        made = export(source, tmp_path / f"back{number}", layout=model.config.model_type)
        assert made.precision == name
        assert json.loads((made.folder / "config.json").read_text())["dtype"] == name
        after = load_file(made.folder / "model.safetensors")
        assert {key: t.dtype for key, t in after.items()} == {key: t.dtype for key, t in before.items()}
        for key, tensor in before.items():
            rounded = architecture == "Gemma3" and tensor.dtype == torch.float32 and "norm" in key
            torch.testing.assert_close(after[key], tensor, rtol=0, atol=2e-7 if rounded else 0)


@pytest.mark.slow
def test_import_in_residuas_layout_keeps_the_dtypes_of_its_run(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "own")
    export(tmp_path / "own", tmp_path / "again")
    export(tmp_path / "run", tmp_path / "wide", precision="float32")
    first = load(tmp_path / "run").state_dict()
    for name, dtype in (("own", torch.bfloat16), ("again", torch.bfloat16), ("wide", torch.float32)):
        assert {t.dtype for t in load_file(tmp_path / name / "model.safetensors").values()} == {dtype}
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert all(torch.equal(tensor, first[key]) for key, tensor in load(tmp_path / name).state_dict().items())


def test_a_sharded_model_is_read_by_its_index(folder: Path, tmp_path: Path) -> None:
    whole = logits(load(folder), tokens())
    content = load_file(folder / "model.safetensors")
    parts = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(sorted(content))}
    for file in set(parts.values()):
        save_file({name: tensor for name, tensor in content.items() if parts[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    assert torch.equal(logits(load(folder), tokens()), whole)
    shutil.move(folder / "part-0.safetensors", tmp_path / "elsewhere.safetensors")
    parts |= {name: "../elsewhere.safetensors" for name, file in parts.items() if file == "part-0.safetensors"}
    index.write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(ValueError, match="not a file inside it"):
        import_folder(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks tensor 'model.norm.weight'"),
        (lambda t: t.update({"model.extra": torch.zeros(2)}), "holds tensor 'model.extra', which qwen3 models do not"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(2)}), "shape [2], but its config.json asks for [32]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "as I8: import the model in 16"),
    ],
    ids=["missing", "surplus", "shape", "quantized"],
)
def test_mismatched_tensors_are_named(folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    content = load_file(folder / "model.safetensors")
    change(content)
    save_file(content, folder / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def ending_in(folder: Path, end: str) -> None:
    """Give a folder a tokenizer of 300 ids, as many as the model has, with this end of text as the last."""
    content = json.loads(Tokenizer.bytes().backend.to_str()) | {"added_tokens": []}
    content["model"]["vocab"] |= {f"unused{n}": n for n in range(256, 299)}
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_special_tokens([end])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))


@pytest.mark.slow
def test_texts_of_an_imported_model_end_in_its_own_token(folder: Path, tmp_path: Path) -> None:
    from residua.data.dataset import Dataset

    ending_in(folder, "[EOS]")
    run, data, text = tmp_path / "run", tmp_path / "data", tmp_path / "text.txt"
    text.write_text("Some text.")
    import_folder(folder, run)
    assert open_model(run)[1].end_of_text == open_model(folder)[1].end_of_text == 299
    export(run, tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (299, 0)
    assert open_model(tmp_path / "out")[1].end_of_text == 299
    for number, tokenizer in enumerate((run / "tokenizer.json", folder)):
        held_out = shutil.copy(text, tmp_path / "held_out.txt")
        options = ("--overlap", "keep", "--validation", held_out, "--tokenizer", tokenizer, "--out", f"{data}{number}")
        done("data", "prepare", text, *options)
        dataset = Dataset.open(f"{data}{number}")
        assert dataset.split("train").read(0, 11).tolist() == [*b"Some text.", 299]
        assert dataset.vocab_size == 300 and dataset.tokenizer.end_of_text == 299
        dataset.require_tokenizer(open_model(run)[1].hash, "the run")
    trained = Run.create(tmp_path / "trained", RunConfig(model=load(run).config))
    trained.keep_tokenizer(tmp_path / "data0" / "tokenizer.json")
    trained.close()
    assert Tokenizer.load(tmp_path / "trained").hash == dataset.tokenizer_hash


@pytest.mark.parametrize("content", ["{}", None])
def test_unusable_tokenizer_is_refused_before_the_weights(content, folder, tmp_path) -> None:
    ending_in(folder, "[EOS]")
    (folder / "tokenizer_config.json").write_text("{}")
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    result = CliRunner().invoke(app, ["import", str(folder), "--out", str(tmp_path / "run")])
    why = "cannot load a tokenizer from" if content else "name the end-of-text token as eos_token"
    assert isinstance(result.exception, ValueError) and why in str(result.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("own", [False, True])
def test_head_of_a_tied_configuration_is_kept_if_different(own: bool, tmp_path: Path, monkeypatch) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr("residua.storage.hugging_face.COMPARED", 3 * 32)  # the last rows are compared too
    folder = tmp_path / "hf"
    saved(folder, "Llama", tie_word_embeddings=True)
    content = load_file(folder / "model.safetensors")
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    content["lm_head.weight"][-1, -1] += own
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    import_folder(folder, tmp_path / "run")
    model = load(tmp_path / "run")
    assert model.config.head.kind == ("untied" if own else "tied")
    theirs = LlamaForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model, tokens()), logits(theirs, tokens()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_model_saved_without_its_head_is_read_if_tied(tied: bool, tmp_path: Path) -> None:
    theirs = saved(tmp_path / "whole", "Llama", tie_word_embeddings=tied)
    theirs.model.save_pretrained(tmp_path / "body")
    if not tied:
        with pytest.raises(ValueError, match=r"lacks tensor 'lm_head\.weight', which its config\.json asks for"):
            import_folder(tmp_path / "body", tmp_path / "run")
        return
    import_folder(tmp_path / "body", tmp_path / "run")
    for place in ("body", "run"):
        ours = logits(load(tmp_path / place), tokens())
        torch.testing.assert_close(ours, logits(theirs, tokens()), rtol=0, atol=1e-5)


def test_tensor_files_match_those_of_safetensors(tmp_path: Path) -> None:
    given = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.zeros(0, 2), "d": torch.randn(2, 2).T}
    entries = [Entry(name, t.dtype, t.shape) for name, t in given.items()]
    write_tensors(tmp_path / "x.safetensors", entries, given.values())
    torch.testing.assert_close(load_file(tmp_path / "x.safetensors"), given, rtol=0, atol=0)


def done(*arguments: object) -> str:
    """The output of the command."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def peak_of_import(tmp_path: Path, **sizes: int) -> tuple[float, int]:
    """The memory that an import takes, as a multiple of its weights, and their bytes."""
    total = write_llama(tmp_path / "hf", **sizes)
    return peak(lambda: import_folder(tmp_path / "hf", tmp_path / "run")) / total, total


SMALL = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
LLAMA = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
"""The shape of Llama 3.2 1B."""


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("sizes", "heads", "least", "most"),
    [(SMALL, 16, 100 * 2**20, 0.5), pytest.param(LLAMA, 32, 2 * 2**30, 1.2, marks=pytest.mark.nightly)],
)
def test_memory_of_an_import_is_bounded(tmp_path: Path, sizes, heads: int, least: int, most: float) -> None:
    share, total = peak_of_import(tmp_path, num_attention_heads=heads, **sizes)
    assert total > least and 0.05 < share < most


@pytest.mark.slow
def test_an_imported_run_works_like_a_trained_run(folder: Path, tmp_path: Path) -> None:
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    assert "qwen3 model" in done("import", folder, "--out", run)
    assert "generate" in done("import", folder, "--out", tmp_path / "other")
    done("generate", run, "--prompt", "The", "--tokens", 4)
    done("diagnose", run, "--text", text, "--out", tmp_path / "diagnosis")
    held_out = shutil.copy(text, tmp_path / "held_out.txt")
    prepared = ("--validation", held_out, "--tokenizer", run / "tokenizer.json", "--out", tmp_path / "data")
    done("data", "prepare", text, "--overlap", "keep", *prepared)
    done("eval", run, "--data", tmp_path / "data")
    done("quantize", run, "--data", tmp_path / "data", "--out", tmp_path / "low")
    assert load(tmp_path / "low").config == load(run).config
    assert "as a qwen3 model" in done("export", run, "--out", tmp_path / "back", "--layout", "qwen3")


@pytest.mark.slow
def test_an_imported_top_1_mixture_generates(tmp_path: Path) -> None:
    """Its router could not be trained from scratch, but it is trained."""
    theirs = saved(tmp_path / "hf", "Mixtral", vocab_size=257, num_local_experts=4, num_experts_per_tok=1)
    import_folder(tmp_path / "hf", tmp_path / "run")
    Tokenizer.bytes().save(tmp_path / "run" / "tokenizer.json")
    model, tokenizer = open_model(tmp_path / "run")
    prompt = tokenizer.encode("The quick brown fox ")
    written = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    (continued,), _ = Generator(model, tokenizer)([prompt], Request(tokens=8))
    assert [*prompt, *continued.tokens] == written[0].tolist()
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    text = open_corpus([tmp_path / "text.txt"], validation=tmp_path / "text.txt")
    prepare(text, tmp_path / "data", "bytes", workers=1)
    done("eval", tmp_path / "run", "--data", tmp_path / "data")
    for layout in ("mixtral", "residua"):
        difference = export(tmp_path / "run", tmp_path / layout, layout=layout).difference
        assert difference is not None and difference < 1e-5


def test_non_finite_weights_are_not_loaded_or_imported(folder: Path, tmp_path: Path) -> None:
    content = load_file(folder / "model.safetensors")
    content["model.norm.weight"][3] = float("inf")
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"hf: weight norm\.weight is not finite \(1 of 32 values: 1 infinite\)"):
        load(folder)
    assert load(folder, allow_nonfinite=True).norm.weight.isinf().any()
    with pytest.raises(ValueError, match=rf"^{folder}: weight norm\.weight is not finite .* not written as BF16"):
        import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
