"""Text to ids and back: a thin layer over the `tokenizers` library.

It determines which token ends a document and identifies the tokenizer by one hash. Special tokens inside a text are
encoded as plain text. It never adds tokens, pads or truncates.

The files next to tokenizer.json, as transformers writes them, name the token that ends a document. Without such files,
it is the first of `END_NAMES` that the tokenizer knows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from residua.data.readers import DataError
from residua.data.tokenizer_limits import MAX_IDS, check_growth, check_size, growth_of, trainable, without_panic
from residua.files import write_atomically
from residua.reading import ReadError, check, inside, parse_json, read_json, read_text, reason, require_file

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in published tokenizers, in order of preference.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
SETTINGS = "tokenizer_config.json"
STATING = (SETTINGS, "special_tokens_map.json", "generation_config.json", "config.json")
"""Files next to a tokenizer.json that name the token that ends a text, in order of preference."""
SOURCE = "source"
"""An imported run's folder of files that `export` restores: config.json, chat template, generation settings."""
BYTE_VALUES = 256
EXPECTED = "expected a tokenizer.json, or a folder that contains it or vocab.json and merges.txt"
IRRELEVANT_TO_IDS = ("post_processor", "truncation", "padding")
MAX_TRAINED_RUN = 256
"""Characters of the longest word to train a BPE on: the trainer's time is quadratic in word length."""
ByteStrings = list[bytes]


class Tokenizer:
    """A `tokenizers.Tokenizer` with an end-of-text token: `end`, or else the first of `END_NAMES` that it knows.

    If it knows none, `<|endoftext|>` is added. `stated` is the token's name if it differs from the one that would be
    found without `end`; `where` names the tokenizer in errors.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end: str | None = None, where: str = "the tokenizer") -> None:
        usual = next((name for name in END_NAMES if backend.token_to_id(name) is not None), END_OF_TEXT)
        name = usual if end is None else end
        self.stated = None if name == usual else name
        backend.add_special_tokens([name])  # an existing token keeps its id
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "<|endoftext|>" inside a text is text, not the end of a document
        self.backend, self.where = backend, where
        self.end_of_text = int(backend.token_to_id(name) or 0)
        self.vocab_size = check_size(backend, where)
        self.growth = growth_of(backend, where)

    @classmethod
    def bytes(cls) -> Tokenizer:
        """A byte tokenizer: ids 0 to 255 are the bytes of the UTF-8 text, 256 ends a document. It needs no training."""
        vocabulary = {symbol: value for value, symbol in enumerate(_byte_symbols())}
        return cls(_byte_level(models.BPE(vocab=vocabulary, merges=[]), words=False))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train a byte-level BPE with GPT-2's splitting rule; a short text may give fewer than `vocab_size` tokens.

        Words longer than `MAX_TRAINED_RUN` are cut only for training: the tokenizer encodes them whole. Training stops
        after `MAX_TRAINED_BYTES` of different words.
        """
        if not BYTE_VALUES < vocab_size <= MAX_IDS:
            raise DataError(
                f"a BPE of {vocab_size} entries cannot be trained: use at least 257, for 256 bytes and "
                f"{END_OF_TEXT}, and at most {MAX_IDS:,}"
            )
        backend = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        words = backend.pre_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([_long_runs(), words])
        backend.train_from_iterator(trainable(texts), trainer)
        backend.pre_tokenizer = words
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a `tokenizer.json`, a folder with one, or a folder with GPT-2's `vocab.json` and `merges.txt`.

        Files next to it, or in `source/` of an imported run, may name the token that ends a text.
        """
        path = Path(path)
        if path.is_dir() and (path / "tokenizer.json").exists():
            path = inside(path, "tokenizer.json")
        try:
            if path.is_dir():
                vocabulary, merges = (inside(path, name) for name in ("vocab.json", "merges.txt"))
                for file in (vocabulary, merges):
                    require_file(file, EXPECTED)
                backend = _byte_level(models.BPE.from_file(str(vocabulary), str(merges)))
                return cls(backend, stated_end(path, backend), f"the tokenizer in {path}")
            backend = tokenizers.Tokenizer.from_str(read_text(path, EXPECTED))
            return cls(backend, stated_end(path.parent, backend), f"the tokenizer {path}")
        except ReadError:
            raise
        except BaseException as error:  # the library raises Exception, and BaseException if it panics
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(f"cannot load a tokenizer from {path} ({reason(error)}): {EXPECTED}") from error

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical serialisation, see `hash_of`."""
        return hash_of(self.backend.to_str(), "the tokenizer", self.stated)

    @cached_property
    def byte_lengths(self) -> np.ndarray | None:
        """Bytes of text by id [vocab_size], 0 for special tokens; None unless the tokenizer is byte-level.

        In a byte-level vocabulary every character of a token stands for one byte.
        """
        if not isinstance(self.backend.decoder, decoders.ByteLevel):
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        for symbol, token in self.backend.get_vocab(with_added_tokens=False).items():
            lengths[token] = len(symbol)
        lengths[list(self.backend.get_added_tokens_decoder())] = 0
        return lengths

    @cached_property
    def _byte_strings(self) -> ByteStrings | None:
        """The bytes that each id stands for; special tokens stand for their names. None as for `byte_lengths`."""
        if not isinstance(self.backend.decoder, decoders.ByteLevel):
            return None
        values = {symbol: value for value, symbol in enumerate(_byte_symbols())}
        strings = [b""] * self.vocab_size
        for token, place in self.backend.get_vocab(with_added_tokens=True).items():
            try:
                strings[place] = bytes(map(values.__getitem__, token))
            except KeyError:  # the name of an added token, with a space in it
                strings[place] = token.encode()
        return strings

    def save(self, path: Path) -> None:
        """Write it as a `tokenizer.json` that every user of the `tokenizers` library can load.

        If `tokenizer.json` does not determine the end-of-text token, a tokenizer_config.json next to it names it.
        """
        write_atomically(path, self.backend.to_str(pretty=True) + "\n")
        settings = path.with_name(SETTINGS)
        if self.stated is not None and not settings.exists():
            write_atomically(settings, json.dumps({"eos_token": self.stated}, indent=2, ensure_ascii=False) + "\n")

    def encode(self, text: str) -> list[int]:
        """Encode a text, without an end-of-text token."""
        check_growth(self.backend, self.growth, [text], self.where)
        encoded = without_panic(lambda: self.backend.encode(text, add_special_tokens=False), self.where)
        ids: list[int] = encoded.ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts; releases the GIL."""
        check_growth(self.backend, self.growth, texts, self.where)
        batch = list(texts)
        encoded = without_panic(lambda: self.backend.encode_batch_fast(batch, add_special_tokens=False), self.where)
        return [encoding.ids for encoding in encoded]

    def require_known(self, ids: Iterable[int], vocab_size: int, holder: str, advice: str) -> None:
        """Raise `DataError` if a model with `vocab_size` ids does not know one of `ids`; the message names its token.

        `holder` begins the message ("the prompt contains"), `advice` ends it.
        """
        unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
        if unknown is None:
            return
        name = self.backend.id_to_token(unknown) if 0 <= unknown < self.vocab_size else None
        token = f"id {unknown}" if name is None else f"{name!r}, id {unknown}"
        raise DataError(f"{holder} {token}, but the model has ids below {vocab_size}: {advice}.")

    def require_model(self, vocab_size: int, folder: Path) -> None:
        """Raise `DataError` if this tokenizer, read from `folder`, cannot be that of a model with `vocab_size` ids.

        Added tokens may exceed these ids, like Gemma 3's image token; `require_known` refuses texts that contain one.
        The end-of-text token and the tokens of plain text must not.
        """
        if self.vocab_size <= vocab_size:
            return
        ends = "name the end-of-text token as eos_token in tokenizer_config.json"
        self.require_known([self.end_of_text], vocab_size, f"by the tokenizer in {folder}, texts end in", ends)
        plain = set(self.backend.get_vocab(with_added_tokens=False).values())
        largest = max(plain - self.backend.get_added_tokens_decoder().keys(), default=0)
        hint = "they do not match, so use the model's own tokenizer"
        self.require_known([largest], vocab_size, f"the tokenizer in {folder} makes", hint)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids; special tokens are shown."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def decode_batch(self, batch: Sequence[np.ndarray]) -> list[str]:
        """Decode several lists of ids; for byte-level tokenizers, in less than half the library's time."""
        strings = self._byte_strings
        if strings is None:
            texts: list[str] = self.backend.decode_batch([ids.tolist() for ids in batch], skip_special_tokens=False)
            return texts
        return [b"".join(map(strings.__getitem__, ids.tolist())).decode("utf-8", "replace") for ids in batch]


def stated_end(folder: Path, backend: tokenizers.Tokenizer) -> str | None:
    """Find the end-of-text token in a folder's files; None if they name none that the tokenizer knows.

    An id only counts if it is a special token's: configurations may hold the default of their class, such as 2.
    """
    special = {number: token.content for number, token in backend.get_added_tokens_decoder().items() if token.special}
    for name in (*STATING, *(f"{SOURCE}/{name}" for name in STATING)):
        path = inside(folder, name)
        if not path.is_file():
            continue
        keys = read_json(path, dict[str, Any], "download or save the tokenizer again", lenient=True)
        token, ids = keys.get("eos_token"), keys.get("eos_token_id")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and backend.token_to_id(token) is not None:
            return token
        for number in ids if isinstance(ids, list) else [ids]:
            if type(number) is int and number in special:
                return str(special[number])
    return None


def hash_of(serialised: str, where: Path | str, stated: str | None = None) -> str:
    """SHA-256 of a tokenizer's JSON, with sorted keys and no white space; `where` names it in errors.

    Parts that do not affect our ids are left out, so GPT-2's two files and its `tokenizer.json` have the same hash.
    `stated` is the end-of-text token if the JSON does not determine it.
    """
    hint = "put the tokenizer.json with which the data was prepared there"
    content = check(parse_json(serialised, where, hint, lenient=True), dict[str, Any], where, hint)
    relevant = {name: value for name, value in content.items() if name not in IRRELEVANT_TO_IDS}
    relevant |= {} if stated is None else {"end_of_text": stated}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def padded_vocabulary(tokens: int) -> int:
    """The vocabulary size of a model for this many token ids: the next multiple of 128, which suits GPU kernels."""
    return -(-tokens // 128) * 128


def _byte_level(model: models.Model, words: bool = True) -> tokenizers.Tokenizer:
    """Build a byte-level tokenizer. With `words`, text is first split at word boundaries, which merges cannot cross."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    return backend


def _long_runs() -> pre_tokenizers.PreTokenizer:
    """Cut long words of GPT-2's rule: runs of letters, digits, other characters or white space."""
    kinds = (r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]", r"\s")
    pattern = "|".join(f"{kind}{{{MAX_TRAINED_RUN}}}" for kind in kinds)
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def _byte_symbols() -> list[str]:
    """The character for each byte in a byte-level vocabulary: itself if printable, else one from U+0100 upward."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(BYTE_VALUES, 2 * BYTE_VALUES))
    return [chr(value if value in printable else next(spare)) for value in range(BYTE_VALUES)]
