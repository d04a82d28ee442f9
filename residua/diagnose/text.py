"""The tokens that a model reads, in sequences of one length, from a file, a prepared dataset, or the run's own text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from residua.config.run import RunConfig
from residua.config.settings import Frozen
from residua.data import Dataset, Split
from residua.data.corpus import TRAIN, VALIDATION
from residua.data.dataset import DESCRIPTION
from residua.data.stdlib import standard_library
from residua.data.tokenizer import Tokenizer
from residua.errors import UserError
from residua.reading import MAX_LOG_BYTES, counted, inside, read_text

DEFAULT_TOKENS = 8192
DEFAULT_LENGTH = 1024
_PIECE = 65_536
"""Tokens of a dataset to read at a time."""
EMBEDDED = "the embedded corpus (Python standard library, validation part)"


class TextFacts(Frozen):
    """The text that the model read. `prefix` holds the token ids before every sequence, as its tokenizer adds them."""

    source: str
    tokens: int
    sequences: int
    length: int
    prefix: list[int] = Field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """Sequences and their targets, [N, T] each, and their origin."""

    tokens: Tensor
    targets: Tensor
    facts: TextFacts
    tokenizer: Tokenizer | None = None

    def text_of(self, token: int) -> str:
        """The text of a token, for display."""
        return f"#{token}" if self.tokenizer is None else self.tokenizer.decode([token])

    def opening(self, tokens: int) -> list[str]:
        """The texts of the first tokens of the first sequence."""
        return [self.text_of(token) for token in self.tokens[0, :tokens].tolist()]

    def first(self, tokens: int) -> Sample:
        """The first whole sequences, up to this many tokens (but at least one)."""
        rows = max(1, tokens // self.tokens.shape[1])
        return replace(self, tokens=self.tokens[:rows], targets=self.targets[:rows])

    def batches(self, tokens_at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Sequences and targets, in batches of at most this many tokens (but at least one sequence)."""
        rows = max(1, tokens_at_once // self.tokens.shape[1])
        yield from zip(self.tokens.split(rows), self.targets.split(rows), strict=True)


class Text(NamedTuple):
    """A text for models to read. `name` is shown on the page and in the summary; `pieces` yields it as ids."""

    name: str
    pieces: Callable[[Tokenizer], Iterable[list[int]]]


def _read_file(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    text = read_text(path, "give --text a file of UTF-8 text", limit=MAX_LOG_BYTES, empty=True)
    yield tokenizer.encode(text)


def _prepared(dataset: Dataset, name: str) -> Text:
    """The validation part of a prepared dataset, or its training part if it has no other."""
    part = VALIDATION if VALIDATION in dataset.splits else TRAIN
    name = f"{name} ({dataset.path}, {'validation' if part == VALIDATION else 'training'} part)"
    return Text(name, partial(_read_split, dataset, dataset.split(part)))


def _read_split(dataset: Dataset, split: Split, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of a dataset; for a model with another tokenizer, its documents are tokenized again."""
    for low in range(0, split.tokens, _PIECE):
        high = min(low + _PIECE, split.tokens)
        ids = split.read(low, high - low)
        if tokenizer.hash == dataset.tokenizer_hash:
            yield ids.tolist()
            continue
        for document in np.split(ids, split.document_starts(low + 1, high) - low):
            ended = int(document[-1]) == dataset.tokenizer.end_of_text
            again = tokenizer.encode(dataset.tokenizer.decode(document[:-1] if ended else document))
            yield [*again, tokenizer.end_of_text] if ended else again


def _read_embedded(tokenizer: Tokenizer) -> Iterator[list[int]]:
    for part in standard_library().parts:
        if part.split == VALIDATION:
            for document, _ in part.read():
                assert isinstance(document, str), "a Python module is read as a whole"
                yield [*tokenizer.encode(document), tokenizer.end_of_text]


def open_text(text: Path | None, folders: Sequence[Path]) -> Text:
    """Open the given text, a file or a prepared dataset; by default the validation text of the first run.

    Models without a training text (imported models, Hugging Face folders) read the embedded corpus.
    """
    if text is not None:
        if (text / DESCRIPTION).is_file():
            return _prepared(Dataset.open(text), "a dataset")
        if not text.is_file():
            raise UserError(
                f"--text {text} is neither a text file nor a prepared dataset: name a UTF-8 text file, or a "
                "folder made by residua data prepare."
            )
        return Text(str(text), partial(_read_file, text))
    run = next((folder for folder in folders if inside(folder, "config.toml").is_file()), None)
    path = None if run is None else RunConfig.from_toml(inside(run, "config.toml")).data.path
    if run is None or path is None:
        return Text(EMBEDDED, _read_embedded)
    if not (Path(path) / DESCRIPTION).is_file():
        raise UserError(f"{path}, the text of {run}, no longer exists: name a text or a dataset with --text.")
    return _prepared(Dataset.open(path), f"the text of {run.resolve().name}")


def sample(
    tokenizer: Tokenizer, *, text: Text, tokens: int, length: int | None, context: int | None, vocabulary: int
) -> Sample:
    """Cut `tokens` of text into sequences of `length` (by default the model's context, at most 1,024)."""
    length = length or min(context or DEFAULT_LENGTH, DEFAULT_LENGTH, tokens)
    if length < 2:
        raise UserError(f"--length {length} is too short: a sequence needs at least 2 tokens.")
    if context is not None and length > context:
        raise UserError(f"--length {length} is longer than the model's context of {context}: use at most {context}.")
    prefix = starting_tokens(tokenizer)
    body = length + 1 - len(prefix)
    wanted = max(1, tokens // length)
    ids = list(islice(chain.from_iterable(text.pieces(tokenizer)), wanted * body))
    count = min(wanted, len(ids) // body)
    if count == 0:
        raise UserError(
            f"{text.name} gives {counted(len(ids), 'token')}, too few for one sequence of {length}: name more text "
            "with --text, or lower --length."
        )
    advice = "name text without it with --text, or put the model's own tokenizer.json into its folder"
    tokenizer.require_known([*prefix, *ids], vocabulary, f"in the model's tokens, {text.name} contains", advice)
    rows = torch.tensor(ids[: count * body]).view(count, body)
    rows = torch.cat([torch.tensor(prefix, dtype=rows.dtype).expand(count, -1), rows], 1)
    facts = TextFacts(source=text.name, tokens=count * length, sequences=count, length=length, prefix=prefix)
    return Sample(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), facts, tokenizer)


def starting_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer's post-processing adds before a text (`<s>`, `<bos>`); its models expect them."""
    plain = tokenizer.backend.encode("a", add_special_tokens=False).ids
    full = tokenizer.backend.encode("a", add_special_tokens=True).ids
    begin = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return list(full[:begin])
