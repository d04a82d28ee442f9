import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from residua.data import DataError, Tokenizer

from .texts import some_texts

SAMPLE = "def f(x):\n\treturn x  # é 世界 \x00\n\n"


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(some_texts(200), 400)


def gpt2_folder(tokenizer: Tokenizer, folder: Path) -> Path:
    """The tokenizer as GPT-2 publishes its own: vocab.json and merges.txt."""
    folder.mkdir()
    model = json.loads(tokenizer.backend.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), "utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    return folder


def test_byte_tokenizer_uses_byte_values_as_ids() -> None:
    tokenizer = Tokenizer.bytes()
    assert tokenizer.encode(SAMPLE) == list(SAMPLE.encode())
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.decode(range(ord("a"), ord("e"))) == "abcd"


def test_trained_bpe_round_trips_and_compresses_its_text(trained: Tokenizer) -> None:
    assert trained.vocab_size == 400
    assert trained.decode(trained.encode(SAMPLE)) == SAMPLE
    text = some_texts(1)[0]
    assert len(trained.encode(text)) < len(text.encode()) / 2


def test_arbitrary_ids_decode_as_in_the_library(trained: Tokenizer) -> None:
    """Also bytes that are not UTF-8, and names of added tokens."""
    named = tokenizers.Tokenizer.from_str(trained.backend.to_str())
    named.add_tokens(["two words", "<|x|>", "世"])
    random = np.random.default_rng(0)
    for tokenizer in (trained, Tokenizer.bytes(), Tokenizer(named)):
        batch = [random.integers(tokenizer.vocab_size, size=size) for size in (0, 1, 7, 300, 5000)]
        texts = tokenizer.decode_batch(batch)
        assert texts == [tokenizer.decode(ids) for ids in batch] and "\ufffd" in texts[-1]
    assert "two words" in texts[-1] and "世" in texts[-1]


def test_training_twice_gives_the_same_hash(trained: Tokenizer) -> None:
    assert Tokenizer.train(some_texts(200), 400).hash == trained.hash
    assert Tokenizer.train(some_texts(200), 401).hash != trained.hash


def test_training_on_words_gives_the_librarys_vocabulary() -> None:
    signs = [
        "=" * 250,
        "word " + "x" * 254 + "'s",
        " " * 250 + "y",
        "1" * 255,
        "世" * 255,
        "it's 1½ _a_ \r\n\t\tб\u0301",
    ]
    texts = [SAMPLE, *some_texts(200), *signs, Path(__file__).read_text("utf-8")]
    texts += [" \n  ".join(some_texts(1500))]  # longer than a piece
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    assert Tokenizer.train(texts, 700).backend.to_str() == Tokenizer(backend).backend.to_str()


@pytest.mark.parametrize("sign", ["x", "世", "7", "-", "\n"])
def test_learned_tokens_are_no_longer_than_the_longest_run(sign: str) -> None:
    tokenizer = Tokenizer.train([sign * 20_000], 1000)
    assert tokenizer.byte_lengths.max() <= len((sign * 256).encode())
    assert tokenizer.decode(tokenizer.encode(sign * 1000)) == sign * 1000


def test_end_of_text_marker_inside_a_text_is_plain_text(trained: Tokenizer) -> None:
    for tokenizer in (trained, Tokenizer.bytes()):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.end_of_text not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_saved_tokenizer_loads_with_the_same_hash_and_ids(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.hash == trained.hash
        assert loaded.end_of_text == trained.end_of_text
        assert loaded.encode(SAMPLE) == trained.encode(SAMPLE)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_gpt2_files_give_the_ids_and_hash_of_tokenizer_json(trained: Tokenizer, tmp_path: Path) -> None:
    loaded = Tokenizer.load(gpt2_folder(trained, tmp_path / "gpt2"))
    assert loaded.encode(SAMPLE) == trained.encode(SAMPLE)
    assert loaded.end_of_text == trained.end_of_text == 0
    assert loaded.hash == trained.hash


def test_parts_that_do_not_change_ids_do_not_change_the_hash(trained: Tokenizer, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(trained.backend.to_str())
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    assert Tokenizer(backend).hash == trained.hash


def test_foreign_tokenizer_does_not_add_pad_or_truncate(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a b a b") == [1, 2, 1, 2]
    assert tokenizer.encode_batch(["a b a b", "b"]) == [[1, 2, 1, 2], [2]]
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (3, 4)


def test_tokenizer_without_an_end_of_text_gets_one(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.backend.id_to_token(tokenizer.end_of_text) == "<|endoftext|>"
    assert tokenizer.vocab_size == 1 + max(7, tokenizer.end_of_text)


def test_files_that_are_not_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"not": "a tokenizer"}')
    for path in (tmp_path / "missing.json", tmp_path / "bad.json", tmp_path):
        with pytest.raises(DataError, match=r"cannot load a tokenizer from|does not exist") as caught:
            Tokenizer.load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="a BPE of 256 entries cannot be trained"):
        Tokenizer.train(["text"], 256)


def test_other_threads_run_while_a_batch_is_encoded(trained: Tokenizer) -> None:
    texts = [" ".join(some_texts(100))] * 40
    ticks = 0
    with ThreadPoolExecutor(1) as pool:
        encoded = pool.submit(trained.encode_batch, texts)
        while not encoded.done():
            time.sleep(0.001)
            ticks += 1
    assert ticks > 3


@pytest.mark.parametrize("kind", ["bytes", "trained", "gpt2 files"])
def test_byte_lengths_sum_to_the_bytes_of_any_text(kind: str, trained: Tokenizer, tmp_path: Path) -> None:
    gpt2 = Tokenizer.load(gpt2_folder(trained, tmp_path / "gpt2"))
    tokenizer = {"bytes": Tokenizer.bytes(), "trained": trained, "gpt2 files": gpt2}[kind]
    text = "def f(x): return 'naïve — 日本語 🙂'\n\n\tend"
    lengths = tokenizer.byte_lengths
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths[tokenizer.end_of_text] == 0


def test_byte_lengths_are_unknown_for_tokenizers_of_other_kinds() -> None:
    assert Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))).byte_lengths is None


def foreign() -> tokenizers.Tokenizer:
    """Bytes, and the special tokens `<|eot_id|>` = 256, `[EOS]` = 257."""
    backend = tokenizers.Tokenizer.from_str(Tokenizer.bytes().backend.to_str())
    content = json.loads(backend.to_str()) | {"added_tokens": []}
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_special_tokens(["<|eot_id|>", "[EOS]"])
    return backend


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "[EOS]"}}, "[EOS]"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|eot_id|>"}}}, "<|eot_id|>"),
        ({"special_tokens_map.json": {"eos_token": "[EOS]"}, "config.json": {"eos_token_id": 256}}, "[EOS]"),
        ({"generation_config.json": {"eos_token_id": [256, 257]}, "config.json": {"eos_token_id": 257}}, "<|eot_id|>"),
        ({"tokenizer_config.json": {"eos_token": "<none>"}, "config.json": {"eos_token_id": 257}}, "[EOS]"),
        ({"source/tokenizer_config.json": {"eos_token": "[EOS]"}}, "[EOS]"),
        ({"config.json": {"eos_token_id": True}}, "<|endoftext|>"),
        ({"config.json": {"eos_token_id": 2}}, "<|endoftext|>"),
    ],
    ids=str,
)
def test_end_of_text_comes_from_neighbouring_files(files: dict[str, object], end: str, tmp_path: Path) -> None:
    foreign().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "source").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = Tokenizer.load(path)
        assert tokenizer.backend.id_to_token(tokenizer.end_of_text) == end
        assert tokenizer.vocab_size == (259 if end == "<|endoftext|>" else 258)


def test_saved_tokenizer_keeps_its_end_of_text_and_hash(tmp_path: Path) -> None:
    first, second = (Tokenizer(foreign(), end) for end in ("[EOS]", "<|eot_id|>"))
    first.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.end_of_text == first.end_of_text != second.end_of_text
    assert loaded.hash == first.hash != second.hash


def test_stating_the_default_end_of_text_changes_nothing(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert Tokenizer.load(tmp_path).hash == trained.hash


def hostile(**parts: object) -> str:
    """A byte-level tokenizer with other parts."""
    return json.dumps(json.loads(Tokenizer.bytes().backend.to_str()) | parts)


def replacing(count: int, pattern: dict[str, str], content: str) -> dict[str, object]:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * count}


LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
REFUSED = {
    "id": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "zz": 1_500_000_000}, "unk_token": "a"}},
        "gives the token 'zz' the id 1500000000, and ids must be below 16,777,216",
    ),
    "chain": ({"normalizer": replacing(40, {"String": "a"}, "aa")}, "the normalizer of .* many times longer"),
    "empty matches": ({"normalizer": replacing(40, {"Regex": "b*"}, "x")}, "the normalizer of .* many times longer"),
    "letters of letters": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LETTERS] * 40}},
        "the pre_tokenizer of .* many times longer",
    ),
    "repeated text": (
        {"post_processor": {"type": "TemplateProcessing", "single": TWICE, "pair": TWICE, "special_tokens": {}}},
        "the post_processor of .* many times longer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokenizer_that_needs_unbounded_memory_is_refused(case: str, tmp_path: Path) -> None:
    parts, words = REFUSED[case]
    (tmp_path / "tokenizer.json").write_text(hostile(**parts))
    with pytest.raises(DataError, match=words) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_replacements_may_not_expand_a_text_beyond_the_limit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("residua.data.tokenizer_limits.MAX_DOCUMENT_BYTES", 10_000)
    (tmp_path / "tokenizer.json").write_text(hostile(normalizer=replacing(5, {"String": "a"}, "aa")))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("banana")) == 3 + 3 * 2**5
    assert len(tokenizer.encode("b" * 9000)) == 9000
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match="can make a text far longer"):
            encode("a" * 900)


def test_regex_panic_is_reported_in_one_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "0")
    pattern = {"Regex": "^(([a-z])+.)+[A-Z]([a-z])+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(hostile(pre_tokenizer=split))
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.json cannot encode this text \(.*retry-limit.*: use another"):
        tokenizer.encode_batch(["banana " * 9])


def test_training_stops_after_enough_different_words(monkeypatch) -> None:
    monkeypatch.setattr("residua.data.tokenizer_limits.MAX_TRAINED_BYTES", 10_000)
    texts = iter([f"word{number}" for number in range(5000)])
    Tokenizer.train(texts, 300)
    assert next(texts) == "word920", "919 words of 7 letters and 4 more bytes each, less a few short ones"
