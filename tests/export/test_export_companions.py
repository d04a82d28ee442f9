"""Exports of an imported model chat as its own folder does: template, special tokens and ids that end a text."""

import json
from pathlib import Path
from typing import Any

import pytest

from residua.data.tokenizer import Tokenizer
from residua.export import export
from residua.storage.hugging_face import companions, import_folder, stop_ids
from tests.convert.tiny import saved

pytest.importorskip("transformers")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}


@pytest.fixture(scope="module", params=["tokenizer_config.json", "files of their own"])
def folder(request: pytest.FixtureRequest, tmp_path_factory) -> Path:
    """A tiny Qwen 3 for chats; its template and the names of its tokens are in one file or in the other."""
    path: Path = tmp_path_factory.mktemp("model") / "hf"
    saved(path, "Qwen3", vocab_size=300, head_dim=16, num_hidden_layers=1, eos_token_id=259)
    tokenizer = Tokenizer.bytes()
    tokenizer.backend.add_special_tokens(["<|im_start|>", *NAMES.values()])
    tokenizer.save(path / "tokenizer.json")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if request.param == "tokenizer_config.json":
        settings |= NAMES | {"chat_template": TEMPLATE, "extra_special_tokens": ["<|im_start|>"]}
    else:
        (path / "chat_template.jinja").write_text(TEMPLATE)
        (path / "special_tokens_map.json").write_text(json.dumps(NAMES))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 256], "temperature": 0.6}))
    return path


def manners(folder: Path) -> dict[str, Any]:
    """How transformers writes and ends texts with the model of a folder."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)
    return {
        "chat": list(chat["input_ids"] if hasattr(chat, "keys") else chat),
        "text": tokenizer("<|im_start|>hi")["input_ids"],
        "names": {name: getattr(tokenizer, name) for name in NAMES},
        "special": sorted(tokenizer.all_special_tokens),
        "generation": GenerationConfig.from_pretrained(folder).to_diff_dict(),
    }


@pytest.mark.slow
def test_every_export_keeps_chat_and_generation_settings(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "run")
    expected = manners(folder)
    start, end = (Tokenizer.load(folder).backend.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert expected["chat"] == [start, *b"hi", end] and expected["generation"]["eos_token_id"] == [259, 256]
    for number, (source, layout) in enumerate(
        [
            (tmp_path / "run", "residua"),
            (tmp_path / "0", "qwen3"),
            (folder, "residua"),
            (tmp_path / "run", "qwen3"),
        ]
    ):
        export(source, tmp_path / str(number), layout=layout)
        found = manners(tmp_path / str(number))
        assert found == expected, (source, layout)
        assert companions(tmp_path / str(number)).keys() == companions(folder).keys() | {"README.md"}
        assert stop_ids(source) == stop_ids(tmp_path / str(number)) == {259, 256}
    config, before = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "0", folder))
    assert config["eos_token_id"] == before["eos_token_id"] == 259
    assert config["pad_token_id"] == before["pad_token_id"] == 0


@pytest.mark.slow
def test_our_tokenizer_accepts_chat_tokens_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from residua.export.folder import end_tokens, json_text, tokenizer_config
    from tests.model.small import small

    assert end_tokens(Tokenizer.bytes(), {}) == {"eos_token_id": 256, "pad_token_id": 256}
    settings = tokenizer_config(Tokenizer.bytes(), small(), {})
    (tmp_path / "tokenizer_config.json").write_text(json_text(settings))
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tuned")
    for own in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "tuned")):
        assert own.apply_chat_template([{"content": "hi"}])["input_ids"] == [257, *b"hi", 258]
        assert own("hi<|endoftext|>")["input_ids"] == [*b"hi", 256] and own.pad_token_id == own.eos_token_id == 256
    text = "hi<|endoftext|><|im_start|>"
    assert Tokenizer.load(tmp_path / "tuned").encode(text) == Tokenizer.bytes().encode(text) == [*text.encode()]


def test_companion_files_of_a_run_come_only_from_its_source(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert companions(tmp_path).keys() == {"tokenizer_config.json"}
    (tmp_path / "config.toml").touch()
    assert companions(tmp_path) == {}


def test_generation_settings_without_an_end_get_the_models(tmp_path: Path) -> None:
    from residua.export.folder import generation_config

    file, special = tmp_path / "generation_config.json", {"eos_token_id": 7}
    kept = {file.name: file}
    for settings, expected in (({"top_k": 2}, {"top_k": 2, **special}), ({"eos_token_id": [3, 2]},) * 2):
        file.write_text(json.dumps(settings))
        assert generation_config(special, kept) == expected
