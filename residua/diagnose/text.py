"""The tokens a model is shown, in sequences of one length: of a file, or the embedded corpus's validation part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.data.corpus import VALIDATION
from residua.data.stdlib import standard_library
from residua.data.tokenizer import Tokenizer
from residua.reading import LOG, read_text

DEFAULT_TOKENS = 8192
DEFAULT_LENGTH = 1024
EMBEDDED = "the embedded corpus (Python standard library, validation part)"


class TextFacts(Frozen):
    """What the model was shown. `prefix` are token ids put before every sequence because its tokenizer does so."""

    source: str
    tokens: int
    sequences: int
    length: int
    prefix: list[int] = Field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """Sequences and their targets, [N, T] each, and where they come from."""

    tokens: Tensor
    targets: Tensor
    facts: TextFacts
    tokenizer: Tokenizer | None = None

    def text_of(self, token: int) -> str:
        """A token as text, for people."""
        return f"#{token}" if self.tokenizer is None else self.tokenizer.decode([token])

    def batches(self, tokens_at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Sequences and targets, in batches of at most this many tokens (but at least one sequence)."""
        rows = max(1, tokens_at_once // self.tokens.shape[1])
        yield from zip(self.tokens.split(rows), self.targets.split(rows), strict=True)


def sample(
    tokenizer: Tokenizer,
    *,
    text: Path | None,
    tokens: int,
    length: int | None,
    context: int | None,
    vocabulary: int,
) -> Sample:
    """`tokens` of text in sequences of `length` (the model's context, 1,024 at most, unless given)."""
    length = length or min(context or DEFAULT_LENGTH, DEFAULT_LENGTH, tokens)
    if length < 2:
        raise ValueError(f"--length {length} is too short: a sequence needs at least 2 tokens.")
    if context is not None and length > context:
        raise ValueError(f"--length {length} is longer than the model's context of {context}: use at most {context}.")
    prefix = starting_tokens(tokenizer)
    body = length + 1 - len(prefix)
    wanted = max(1, tokens // length)
    ids = _take(_encoded(tokenizer, text), wanted * body)
    count = min(wanted, len(ids) // body)
    if count == 0:
        source = text or EMBEDDED
        raise ValueError(
            f"{source} gives {len(ids)} tokens, too few for one sequence of {length}: add text or lower --length."
        )
    if (largest := max(ids)) >= vocabulary:
        raise ValueError(
            f"the tokenizer made id {largest} and the model's vocabulary has {vocabulary}: they do not belong together."
        )
    rows = torch.tensor(ids[: count * body]).view(count, body)
    rows = torch.cat([torch.tensor(prefix, dtype=rows.dtype).expand(count, -1), rows], 1)
    facts = TextFacts(
        source=str(text) if text else EMBEDDED, tokens=count * length, sequences=count, length=length, prefix=prefix
    )
    return Sample(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), facts, tokenizer)


def starting_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer's post-processing puts before a text (`<s>`, `<bos>`); its models expect them."""
    plain = tokenizer.backend.encode("a", add_special_tokens=False).ids
    full = tokenizer.backend.encode("a", add_special_tokens=True).ids
    begin = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return list(full[:begin])


def _encoded(tokenizer: Tokenizer, text: Path | None) -> Iterator[list[int]]:
    if text is not None:
        yield tokenizer.encode(read_text(text, "give --text a file of UTF-8 text", limit=LOG, empty=True))
        return
    for part in standard_library().parts:
        if part.split == VALIDATION:
            for document, _ in part.read():
                yield [*tokenizer.encode(document), tokenizer.end_of_text]


def _take(pieces: Iterable[list[int]], count: int) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        ids += piece
        if len(ids) >= count:
            break
    return ids[:count]
