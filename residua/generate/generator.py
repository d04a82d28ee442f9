"""Generate text: prefill the prompts, then decode one token per row per step until every row has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from residua.errors import UserError
from residua.generate.engine import Step, build_step, engine_for
from residua.generate.sample import Sampler, Sampling
from residua.generate.text import TextStream
from residua.generate.transfer import Arrival, integers, padded, send
from residua.model.inference import Forward
from residua.model.moe import mixtures
from residua.reading import counted
from residua.report.terminal import Progress
from residua.storage.tensors import overflowed

if TYPE_CHECKING:
    from residua.data.tokenizer import Tokenizer
    from residua.model.cache import Cache
    from residua.model.decoder import Decoder

CHUNK = 512
PREFILLED = 65_536
"""The most prompt tokens, over all prompts, read in one pass."""
MULTIPLE = 64
"""Prompts are padded to a multiple of this many tokens, so that only a few batch shapes are captured as CUDA graphs."""
GREEDY = Sampling()

Reason = Literal["end", "stop", "length"]
Show = Callable[[int, str], None]
"""Called with the index of a prompt and its next piece of text."""


@dataclass(frozen=True)
class Speed:
    """The speed of generating a batch. A step produces one token per row and reads the weights it needs once.

    `first_tokens` of the `new_tokens`, one per row, came from the prefill, not from a step.
    """

    prompt_tokens: int
    prefill_seconds: float
    first_tokens: int
    new_tokens: int
    steps: int
    decode_seconds: float
    bytes_per_step: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, excluding those from the prefill."""
        return (self.new_tokens - self.first_tokens) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Weight bytes read per second of decoding."""
        return self.steps * self.bytes_per_step / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Completion:
    """The continuation of one prompt: tokens without the end-of-text token, and text up to the stop string.

    reason: `end` (end of text), `stop` (a stop string) or `length` (the token limit or the end of the context).
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: Reason = "length"


@dataclass(frozen=True)
class Request:
    """How to continue prompts: at most `tokens` new tokens, fewer if the model's context ends earlier."""

    tokens: int = 128
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"tokens is {self.tokens}: generate at least 1.")
        if "" in self.stop:
            raise UserError("a stop string is empty: it would stop before the first token.")


class Generator:
    """A model with its tokenizer, ready to continue texts.

    The cache and a captured step are reused between calls if they are large enough.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        engine: str = "auto",
        chunk: int | None = None,
        ends: Collection[int] = (),
    ) -> None:
        """Prompts are read `chunk` tokens at a time; the default is 512, or on a GPU as many as `PREFILLED` allows.

        `ends` are ids that end a text, in addition to the tokenizer's own.
        """
        self.model, self.tokenizer, self.chunk = model.eval(), tokenizer, chunk
        self.ends = {tokenizer.end_of_text, *ends}
        self.engine = engine_for(model, engine)
        self._forward = prompt_reader(model, self.engine)
        self._cache: Cache | None = None
        self._step: Step | None = None

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        request: Request,
        show: Show | None = None,
        progress: Progress | None = None,
    ) -> tuple[list[Completion], Speed]:
        """Continue texts or token lists in one batch. `progress` counts steps; the batch may end before the last."""
        rows, limits = self.check(prompts, request)
        began = time.perf_counter()
        cache = self._empty_cache(len(rows), max(map(len, rows)) + max(limits) + 2)
        logits = first_logits(self.model, self._forward, cache, rows, self.chunk)
        if not torch.isfinite(logits).all():
            raise overflowed("the prediction after the prompt", self.model)
        middle = time.perf_counter()
        batch = _Batch([TextStream(self.tokenizer.decode, request.stop) for _ in rows], limits, show or _silent)
        steps = self._decode(batch, logits, cache, request, progress or _silent)
        self._wait()
        ended = time.perf_counter()
        lengths = [len(completion.tokens) for completion in batch.completions]
        return batch.completions, Speed(
            prompt_tokens=sum(map(len, rows)),
            prefill_seconds=middle - began,
            first_tokens=sum(map(bool, lengths)),
            new_tokens=sum(lengths),
            steps=steps,
            decode_seconds=ended - middle,
            bytes_per_step=weight_bytes(self.model, len(rows)),
        )

    def check(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], request: Request
    ) -> tuple[list[list[int]], list[int]]:
        """The tokens of each prompt, and how many more may follow. Refuses prompts that cannot be continued."""
        if not prompts:
            raise UserError("there is no prompt: give the model a text to continue.")
        rows = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        return rows, [self._limit(row, request) for row in rows]

    def _decode(self, batch: _Batch, logits: Tensor, cache: Cache, request: Request, progress: Progress) -> int:
        seeds = [request.sampling.seed + i for i in range(len(batch.limits))]
        sampler = Sampler(request.sampling, seeds, max(batch.limits) + 1, self.tokenizer.vocab_size, logits.device)
        cache.static = self.engine != "eager"
        tokens, steps = sampler(logits, 0), 0
        while True:
            arrival = Arrival(tokens)
            going_on = steps + 1 < max(batch.limits)
            # start the next step before reading these tokens, so that the device does not wait for the host; a step
            # that is not built yet runs after them, because its kernels may need compiling
            ahead = going_on and self._step is not None
            if ahead:
                tokens, steps = sampler(self._built(cache)(tokens), steps + 1), steps + 1
            ended = batch.add([int(token) for token in arrival.wait().tolist()], self.ends)
            ended = ended or not going_on
            if not (ahead or ended):
                tokens, steps = sampler(self._built(cache)(tokens), steps + 1), steps + 1
            progress(steps, max(batch.limits))
            if ended:
                return steps

    def _built(self, cache: Cache) -> Step:
        self._step = self._step or build_step(self.model, cache, self.engine)
        return self._step

    def _limit(self, prompt: Sequence[int], request: Request) -> int:
        context = self.model.config.context
        if not prompt:
            raise UserError("the prompt is empty: give the model a text to continue.")
        if len(prompt) >= context:
            raise UserError(
                f"the prompt has {counted(len(prompt), 'token')}, but the model's context is {context}: shorten it to "
                f"at most {context - 1}."
            )
        self.tokenizer.require_known(prompt, self.model.config.vocab_size, "the prompt contains", "leave it out")
        return min(request.tokens, context - len(prompt))

    def _empty_cache(self, batch: int, capacity: int) -> Cache:
        cache = self._cache
        if cache is not None and len(cache.lengths) == batch and cache.capacity >= capacity:
            cache.clear()
            return cache
        self._step = None
        self._cache = self.model.new_cache(batch, capacity)
        return self._cache

    def _wait(self) -> None:
        if self.model.embed.weight.is_cuda:
            torch.cuda.synchronize()


class _Batch:
    """The rows of a batch during generation."""

    def __init__(self, streams: list[TextStream], limits: list[int], show: Show) -> None:
        self.streams, self.limits, self.show = streams, limits, show
        self.completions = [Completion() for _ in streams]
        self.open = set(range(len(streams)))

    def add(self, tokens: list[int], ends: Collection[int]) -> bool:
        """Add the next token of every unfinished row; True once all have ended."""
        for i in sorted(self.open):
            row, stream = self.completions[i], self.streams[i]
            if tokens[i] in ends:
                self._close(i, "end")
                continue
            row.tokens.append(tokens[i])
            self._tell(i, stream.push(tokens[i]))
            if stream.stopped:
                self._close(i, "stop")
            elif len(row.tokens) == self.limits[i]:
                self._close(i, "length")
        return not self.open

    def _close(self, i: int, reason: Reason) -> None:
        self._tell(i, self.streams[i].finish())
        # the last characters may have completed a stop string
        self.completions[i].reason = "stop" if self.streams[i].stopped else reason
        self.completions[i].text = self.streams[i].text
        self.open.remove(i)

    def _tell(self, i: int, piece: str) -> None:
        if piece:
            self.show(i, piece)


def prompt_reader(model: Decoder, engine: str) -> Forward | None:
    """The prompt reader for this engine; None: the model itself, op by op."""
    return Forward(model) if engine != "eager" and model.embed.weight.is_cuda else None


def first_logits(
    model: Decoder, reader: Forward | None, cache: Cache, rows: Sequence[Sequence[int]], chunk: int | None = None
) -> Tensor:
    """The logits [B, V] after prompts, which fill an empty cache `chunk` tokens at a time."""
    if reader is None:
        return model.logits(prefill(model, cache, rows, chunk or CHUNK))
    return model.logits(prefill(reader, cache, rows, chunk or max(CHUNK, PREFILLED // len(rows)), MULTIPLE))


def prefill(
    model: Decoder | Forward, cache: Cache, rows: Sequence[Sequence[int]], chunk: int = CHUNK, multiple: int = 1
) -> Tensor:
    """Fill an empty cache with prompts of any lengths, `chunk` tokens at a time.

    They are padded to a `multiple` of tokens if the cache has room, so that there are few distinct batch shapes.
    Returns the final state [B, C] of each row's last token.
    """
    device = cache.lengths.device
    lengths = send(integers(map(len, rows)), device)
    longest = max(len(row) for row in rows)
    longest = min(-(-longest // multiple) * multiple, max(longest, cache.capacity))
    ragged = multiple > 1 or any(len(row) < longest for row in rows)
    every, last = send(padded(rows, longest), device), torch.empty(0)
    for at in range(0, longest, chunk):
        tokens = every[:, at : at + chunk]
        width = tokens.shape[1]
        counts = (lengths - at).clamp(0, width) if ragged else None
        hidden = model.hidden(tokens, cache=cache, counts=counts)
        place = lengths - 1 - at
        here = hidden[torch.arange(len(rows), device=device), place.clamp(0, width - 1)]
        last = here if at == 0 else torch.where((place >= 0)[:, None], here, last)
    return last


def weight_bytes(model: Decoder, rows: int) -> int:
    """The most bytes of weights that a decoding step of `rows` tokens reads.

    Excludes an embedding that is not also the head, and experts beyond the number that the tokens can visit.
    """
    weights = [
        w for w in (*model.parameters(), *model.buffers()) if model.unembed is None or w is not model.embed.weight
    ]
    idle = {mixture: max(0, mixture.count - rows * mixture.router.top_k) for mixture in mixtures(model)}
    return _bytes(weights) - sum(_bytes(m.experts.parameters()) // m.count * count for m, count in idle.items())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _silent(*_: object) -> None:
    pass
