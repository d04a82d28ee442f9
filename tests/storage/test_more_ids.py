"""Tokenizers with more ids than their model: Gemma 3 has one for images, which its text models do not know."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from residua.config.run import RunConfig
from residua.data import Dataset, Tokenizer, open_corpus, prepare
from residua.data.source import open_data
from residua.evaluate.score import Scorer, score_text
from residua.storage.hugging_face import import_folder
from residua.storage.model_folder import open_model, open_text
from residua.train.start import check_tokenizer
from tests.convert.tiny import GEMMA, saved
from tests.storage.test_imported import done

pytest.importorskip("transformers")
WORDS = "The quick brown fox jumps over the lazy dog. " * 60
UNKNOWN = "contains '<extra>', id 258, but the model has ids below 257: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 with 257 ids; its tokenizer has the bytes, the end of a text, and two further added tokens."""
    path = tmp_path_factory.mktemp("gemma") / "hf"
    saved(path, "Gemma3", vocab_size=257, query_pre_attn_scalar=8, sliding_window_pattern=2, **GEMMA)
    backend = tokenizers.Tokenizer.from_str(Tokenizer.bytes().backend.to_str())
    backend.add_special_tokens(["<image_soft_token>"])
    backend.add_tokens(["<extra>"])
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    import_folder(folder, tmp_path / "run")
    return tmp_path / "run"


def prepared(text: str, tokenizer: Path, out: Path) -> Dataset:
    file = out.with_suffix(".txt")
    file.write_text(text)
    return prepare(open_corpus([file], validation=file), out, str(tokenizer), workers=1)


@pytest.mark.slow
def test_every_command_accepts_a_model_with_extra_ids(folder: Path, run: Path, tmp_path: Path) -> None:
    data, text = tmp_path / "data", tmp_path / "text.txt"
    text.write_text(f"{WORDS} <image_soft_token>")  # special tokens inside a text are text
    held_out = shutil.copy(text, tmp_path / "held_out.txt")
    done("data", "prepare", text, "--validation", held_out, "--overlap", "keep", "--tokenizer", folder, "--out", data)
    assert Dataset.open(data).vocab_size == 259
    done("eval", run, "--data", data)
    done("diagnose", run, "--text", text, "--tokens", 128, "--out", tmp_path / "diagnosis")
    done("quantize", run, "--data", data, "--out", tmp_path / "low")
    changes = ["model.topology=dense", "train.steps=2", "train.schedule.warmup=1", "train.device=cpu"]
    printed = done("train", "--from", run, *changes, "--data", data, "--out", tmp_path / "new")
    assert "257 token ids; the tokenizer has 2 more, which do not occur in the text\n" in printed
    done("export", run, "--out", tmp_path / "back", "--layout", "gemma3_text")
    for model in (folder, run, tmp_path / "low", tmp_path / "new", tmp_path / "back"):
        done("generate", model, "--prompt", "<image_soft_token>", "--tokens", 2)


def test_generate_refuses_a_prompt_with_an_unknown_id(run: Path, sentence) -> None:
    assert sentence("generate", run, "--prompt", "The <extra> fox") == f"the prompt {UNKNOWN}leave it out."


def test_diagnose_refuses_text_with_an_unknown_id(run: Path, tmp_path: Path, sentence) -> None:
    (tmp_path / "text.txt").write_text(f"<extra> {WORDS}")
    arguments = ("--text", tmp_path / "text.txt", "--out", tmp_path / "out", "--tokens", 64)
    assert f"text.txt {UNKNOWN}name text without it with --text" in sentence("diagnose", run, *arguments)


def test_eval_refuses_an_unknown_id_before_scoring(run: Path) -> None:
    scorer = Scorer(*open_model(run))
    assert len(scorer.score(scorer.pairs([("The quick", " brown fox")]))) == 1
    with pytest.raises(ValueError, match=f"^a text to score {UNKNOWN}"):
        scorer.score(scorer.pairs([("The quick", " brown fox"), ("The", " <extra>")]))


def test_prepared_text_may_not_contain_unknown_ids(run: Path, tmp_path: Path) -> None:
    config = RunConfig.from_toml(run / "config.toml").override([f"train.start='{run}'"])
    model, _ = open_model(run)
    plain = prepared(WORDS, run / "tokenizer.json", tmp_path / "plain")
    extra = prepared(f"{WORDS} <extra>", run / "tokenizer.json", tmp_path / "extra")
    begun = config.override([f"data.path='{plain.path}'"])
    check_tokenizer(begun, open_data(begun))
    assert open_text(run, model.config, plain.path)[0].vocab_size == 259
    assert score_text(model, plain, tokens=64).loss > 0
    for refuse in (
        lambda: open_data(config.override([f"data.path='{extra.path}'"])),
        lambda: open_text(run, model.config, extra.path),
        lambda: score_text(model, extra),
    ):
        with pytest.raises(ValueError, match=f"^{extra.path} {UNKNOWN}(prepare|prepare the|name) text without it"):
            refuse()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"added": ["<eos>"], "end": "<eos>"},
            "texts end in '<eos>', id 257, .*: name the end-of-text token as eos_token",
        ),
        ({"vocab": ["plain"], "end": "<|endoftext|>"}, "makes 'plain', id 257, .*: they do not match"),
    ],
    ids=["end", "plain"],
)
def test_only_added_tokens_may_exceed_the_models_vocabulary(change, message, folder, run, tmp_path) -> None:
    content = json.loads(Tokenizer.bytes().backend.to_str())
    content["model"]["vocab"] |= {name: n for n, name in enumerate(["<|endoftext|>", *change.get("vocab", [])], 256)}
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_special_tokens(change.get("added", []))
    other = shutil.copytree(folder, tmp_path / "other")
    for place in (other, run):
        backend.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": change["end"]}))
    sentence = f"the tokenizer in {{}},? {message}"
    with pytest.raises(ValueError, match=sentence.format(other)):
        import_folder(other, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=sentence.format(run)):
        open_model(run)
