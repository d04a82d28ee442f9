"""The text that a folder's model is measured on: its own, in its own tokens, or refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import residua
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import DataError, Dataset, open_corpus, prepare
from residua.data.source import open_data
from residua.data.tokenizer import Tokenizer
from residua.quantize import quantize
from residua.storage.checkpoint import FOLDER
from residua.storage.model_folder import open_text
from residua.storage.tensors import save_tensors
from tests.model.small import small
from tests.trained import residua as command


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text in place of the embedded corpus."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(n * n) for n in range(2000)))
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("residua.data.stdlib.standard_library", lambda: open_corpus([text], validation=text))
    return text


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A run as an import leaves it, with tokens that the embedded corpus does not have by default."""
    run = tmp_path / "run"
    (run / FOLDER / "step-0").mkdir(parents=True)
    (run / "source").mkdir()
    (run / "source" / "chat_template.jinja").write_text("{{ messages }}")
    config = RunConfig(model=small(vocab_size=300, context=16))
    (run / "config.toml").write_text(config.to_toml())
    (run / FOLDER / "step-0" / "state.json").write_text(json.dumps({"step": 0, "validation_loss": None}))
    save_tensors(residua.build(config.model).state_dict(), run / FOLDER / "step-0" / "model.safetensors")
    Tokenizer.bytes().save(run / "tokenizer.json")
    return run


@pytest.mark.slow
def test_imported_model_is_measured_with_its_own_tokenizer(
    imported: Path, corpus, tmp_path, monkeypatch, capsys
) -> None:
    result = quantize(imported, tmp_path / "low", scheme="fp8-row", probes=0)
    assert Dataset.open(result.text).tokenizer_hash == Tokenizer.bytes().hash
    for folder in (imported, tmp_path / "low"):
        assert command(monkeypatch, "eval", folder) == 0, capsys.readouterr().err
    assert (tmp_path / "low" / "source" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_text_of_another_tokenizer_is_refused_at_any_size(imported: Path, corpus: Path, tmp_path: Path) -> None:
    model = residua.load(imported).config
    for size in (280, 400):
        other = prepare(open_corpus([corpus], validation=corpus), tmp_path / str(size), f"bpe:{size}", workers=1).path
        with pytest.raises(
            ConfigError, match=f"^{other} was tokenized differently from .*: name text with --data that was"
        ):
            open_text(imported, model, other)
    (imported / "source" / "chat_template.jinja").unlink()
    (imported / "source").rmdir()  # as folders were quantized before
    with pytest.raises(
        ConfigError, match=r"^the embedded corpus was tokenized differently .* --tokenizer .*tokenizer\.json"
    ):
        open_text(imported, model, None)


def test_an_imported_model_without_a_tokenizer_has_no_text(imported: Path, corpus: Path) -> None:
    (imported / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer: put"):
        open_text(imported, small(vocab_size=2048), None)


def test_pretrained_start_suggests_retokenizing_not_resizing(imported: Path, corpus: Path, tmp_path: Path) -> None:
    other = prepare(open_corpus([corpus], validation=corpus), tmp_path / "other", "bpe:320", workers=1)
    config = RunConfig(model=small(vocab_size=300, context=16), data={"path": str(other.path)})
    with pytest.raises(ConfigError, match=r": set model\.vocab_size="):
        open_data(config)
    with pytest.raises(DataError, match=r": prepare text without it with --tokenizer .*run/tokenizer\.json"):
        open_data(config.override([f"train.start='{imported}'"]))
    with pytest.raises(DataError, match=r" --tokenizer 'my run/tokenizer\.json'"):
        open_data(config.override(["train.start='my run'"]))


@pytest.fixture(params=[["train"], ["compare", "base", "mgr"]], ids=["train", "compare"])
def refused(request: pytest.FixtureRequest, imported: Path, tmp_path: Path, sentence) -> Callable[..., str]:
    """Gives the sentence with which a command refuses to start from the import."""
    return partial(sentence, *request.param, "--from", imported, "--out", tmp_path / "new")


def test_import_without_a_tokenizer_needs_prepared_text(imported: Path, corpus: Path, refused) -> None:
    (imported / "tokenizer.json").unlink()
    config = RunConfig(model=small(vocab_size=2048, context=16))  # has room for the default tokens
    (imported / "config.toml").write_text(config.to_toml())
    assert refused() == (
        f"{imported} has no tokenizer.json, so the embedded corpus cannot be tokenized for its model: give --data "
        "a folder prepared with the model's own tokenizer."
    )


def test_import_without_a_tokenizer_accepts_explicit_text(imported: Path, corpus, tmp_path) -> None:
    (imported / "tokenizer.json").unlink()
    config = RunConfig.from_toml(imported / "config.toml").override([f"train.start='{imported}'"])
    data = prepare(open_corpus([corpus], validation=corpus), tmp_path / "data", "bytes", workers=1)
    for change in (f"data.path='{data.path}'", "data.tokenizer=bytes"):
        assert open_data(config.override([change])).tokenizer_hash == data.tokenizer_hash


def test_text_of_another_tokenizer_than_the_start_is_refused(imported: Path, corpus: Path, tmp_path, refused) -> None:
    data = prepare(open_corpus([corpus], validation=corpus), tmp_path / "data", "bpe:260", workers=1)
    assert refused("--data", data.path) == (
        f"{data.path} was prepared with a different tokenizer than {imported}: prepare it with "
        f"--tokenizer {imported}/tokenizer.json."
    )
