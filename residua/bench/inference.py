"""Compares inference of several models: the time to the first token, and of a decoding step.

The models take turns in every round, so that changes of the device's clock affect all of them equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, TypeVar

import torch
from rich.console import Console

from residua import ops
from residua.bench.operators import Ceilings, measure_ceilings
from residua.bench.show import BenchProgress, Tell, number
from residua.bench.step import Case, read_models
from residua.config.model import ModelConfig
from residua.generate.engine import Step, build_step, engine_for, launched_step, resolve_engine
from residua.generate.generator import MULTIPLE, first_logits, prompt_reader, weight_bytes
from residua.model.cache import Cache
from residua.model.decoder import Decoder
from residua.model.size import build_if_it_fits, measure
from residua.report.terminal import new_table
from residua.storage.model_folder import place, ready
from residua.train.timing import Sample, peak_flops, release_memory, synchronize, time_each

T = TypeVar("T")

STEPS = 8
"""Decoding steps per timing."""
PEER = "transformers"


@dataclass(frozen=True)
class DecodeResult:
    """The time of one model's decoding step at one batch size, and its ratio to that of the first model.

    A step reads `weight_bytes` of weights and `cache_bytes` of the cache, and launches `kernels` kernels.
    """

    model: str
    case: str
    batch: int
    engine: str
    weight_bytes: int
    cache_bytes: int
    step: Sample
    ratio: float
    kernels: int | None

    @property
    def bytes_per_second(self) -> float:
        """Bytes of weights and cache read per second."""
        return (self.weight_bytes + self.cache_bytes) / self.step.median


@dataclass(frozen=True)
class PrefillResult:
    """The time from `batch` prompts of `length` tokens on the host to their first new tokens on the host.

    `ratio` is relative to the first model. `first_call` is the time of the process's first prefill with this model,
    which includes loading or compiling kernels. MFU is the model's FLOP/s as a share of the device's peak; it is
    unknown on a CPU.
    """

    model: str
    case: str
    batch: int
    length: int
    engine: str
    first_token: Sample
    ratio: float
    flops: float
    mfu: float | None
    first_call: float

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens read per second."""
        return self.batch * self.length / self.first_token.median


@dataclass
class _Contender:
    """A model to time: `time` returns the seconds of one run; `facts` go into the result."""

    name: str
    time: Callable[[], float]
    backend: Callable[[], AbstractContextManager[object]]
    facts: dict[str, Any]
    seconds: list[float] = field(default_factory=list)


def _built(
    cases: Sequence[Case], build: Callable[[Case], _Contender], title: str, tell: Tell
) -> list[_Contender]:  # fmt: skip
    """The contenders of all cases. `tell` gets the current activity and the share of all work that is done; building
    counts as half."""
    contenders = []
    for done, case in enumerate(cases):
        tell(f"{title}: building {case.name}", done / len(cases) / 2)
        contenders.append(build(case))
    return contenders


def _timed(
    contenders: Sequence[_Contender], rounds: int, title: str, tell: Tell
) -> Iterator[tuple[_Contender, Sample, float]]:
    """The contenders with their times, and the ratios of their medians to the first one's."""
    for done in range(rounds):
        tell(f"{title}: round {done + 1} of {rounds}", (1 + done / rounds) / 2)
        for contender in contenders:
            with contender.backend():
                contender.seconds.append(contender.time())
    samples = [Sample.of(contender.seconds) for contender in contenders]
    for contender, sample in zip(contenders, samples, strict=True):
        yield contender, sample, sample.median / samples[0].median


def build_random(case: Case, device: torch.device) -> Decoder:
    """The model of a case with random weights, ready to run, in bfloat16 on a GPU."""
    torch.manual_seed(case.config.train.seed)
    with torch.device("meta"):
        built = build_if_it_fits(case.config.model, case.name)
    model = built.to_empty(device=device)
    model.reset_parameters()
    return place(ready(model), device)


@torch.inference_mode()
def bench_decode(
    model: str,
    cases: Sequence[Case],
    device: torch.device,
    *,
    batch: int,
    filled: int,
    engine: str,
    rounds: int,
    tell: Tell = lambda text, share: None,
) -> list[DecodeResult]:
    """Time `rounds` × 8 steps of every case with `filled` tokens per cache row; ratios are to the first case."""
    engine, title = resolve_engine(engine, device), f"{model}, batch {batch}"
    build = partial(_decoding, device=device, batch=batch, filled=filled, engine=engine)
    contenders = _built(cases, build, title, tell)
    results = [
        DecodeResult(model, c.name, batch, engine, step=sample, ratio=ratio, **c.facts)
        for c, sample, ratio in _timed(contenders, rounds, title, tell)
    ]
    contenders.clear()
    release_memory(device)
    return results


def _decoding(case: Case, device: torch.device, batch: int, filled: int, engine: str) -> _Contender:
    model, tokens = build_random(case, device), torch.zeros(batch, dtype=torch.int64, device=device)
    cache = model.new_cache(batch, filled + STEPS)
    for tensor in cache.tensors():
        tensor.normal_(std=0.1)

    def rewind() -> None:
        cache.lengths.fill_(filled)
        cache.reach, cache.static = filled, True

    rewind()
    with ops.backend(case.backend):
        kernels = _kernels(launched_step(model, cache, engine), cache) if device.type == "cuda" else None
        rewind()
        run = build_step(model, cache, engine)
        run(tokens)

    def steps() -> None:
        for _ in range(STEPS):
            run(tokens)

    def timed() -> float:
        rewind()
        steps()  # warms the device's cache, as steady decoding does
        (seconds,) = time_each(steps, 1, device, before=rewind)
        synchronize(device)
        return seconds / STEPS

    read = sum(t.numel() * t.element_size() for t in cache.tensors()) * filled // (filled + STEPS)
    facts = {"weight_bytes": weight_bytes(model, batch), "cache_bytes": read, "kernels": kernels}
    return _Contender(case.name, timed, lambda: ops.backend(case.backend), facts)


def _kernels(step: Step, cache: Cache) -> int:
    """The number of kernels that the device runs in one step."""
    tokens = torch.zeros_like(cache.lengths)
    step(tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(tokens)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@torch.inference_mode()
def bench_prefill(
    model: str,
    cases: Sequence[Case],
    device: torch.device,
    *,
    batch: int,
    length: int,
    engine: str,
    rounds: int,
    peers: bool = True,
    tell: Tell = lambda text, share: None,
) -> list[PrefillResult]:
    """Time every case `rounds` times; ratios are to the first. With `peers`, also a transformers Llama of its shape."""
    torch.manual_seed(0)
    rows = torch.randint(cases[0].config.model.vocab_size, (batch, length)).tolist()
    title = f"{model}, {batch} × {length}"
    contenders = _built(cases, partial(_reading, device=device, rows=rows, engine=engine), title, tell)
    peer = _llama(cases[0].config.model, device, rows, contenders[0].facts["flops"]) if peers else None
    contenders += [] if peer is None else [peer]
    for contender in contenders:
        with contender.backend():
            began = time.perf_counter()
            contender.time()
            contender.facts["first_call"] = time.perf_counter() - began
            contender.time()
    peak = peak_flops(device)
    results = [
        PrefillResult(
            model, c.name, batch, length, first_token=sample, ratio=ratio,
            mfu=None if peak is None else c.facts["flops"] / sample.median / peak, **c.facts,
        )
        for c, sample, ratio in _timed(contenders, rounds, title, tell)
    ]  # fmt: skip
    contenders.clear()
    release_memory(device)
    return results


def _reading(case: Case, device: torch.device, rows: list[list[int]], engine: str) -> _Contender:
    model = build_random(case, device)
    engine = engine_for(model, engine)
    reader = prompt_reader(model, engine)
    cache = model.new_cache(len(rows), len(rows[0]) + MULTIPLE)

    def run() -> object:
        cache.clear()
        return first_logits(model, reader, cache, rows).argmax(-1).tolist()

    facts = {"engine": engine, "flops": prefill_flops(case.config.model, len(rows), len(rows[0]))}
    return _Contender(case.name, lambda: time_each(run, 1, device)[0], lambda: ops.backend(case.backend), facts)


def prefill_flops(config: ModelConfig, batch: int, length: int) -> float:
    """Two FLOPs per multiply-add of active weights and causal attention; the head counts only for the last tokens."""
    head = 2 * config.vocab_size * config.width
    each = measure(config.override([f"context={length}"])).flops_per_token / 3 - head
    return batch * (length * each + head)


def _llama(config: ModelConfig, device: torch.device, rows: list[list[int]], flops: float) -> _Contender | None:
    """A Llama with as many attention and feed-forward weights as a dense softmax model; None if not applicable."""
    softmax, ffn = config.softmax, config.ffn
    if find_spec(PEER) is None or softmax is None or ffn.mixture:
        return None
    import transformers

    shape: Any = transformers.LlamaConfig
    peer = shape(
        vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.layers,
        intermediate_size=ffn.hidden if ffn.gated else 2 * ffn.hidden // 3, num_attention_heads=softmax.heads,
        num_key_value_heads=softmax.kv_heads or softmax.heads, head_dim=softmax.head_dim or None,
        max_position_embeddings=max(config.context, len(rows[0])), tie_word_embeddings=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        llama: Any = transformers.LlamaForCausalLM(peer)
    llama = llama.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()

    def run() -> object:
        tokens = torch.tensor(rows, device=device)
        return llama(tokens, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

    facts = {"engine": "eager", "flops": flops}
    return _Contender(f"{PEER} Llama", lambda: time_each(run, 1, device)[0], nullcontext, facts)


def bench_each(
    presets: Sequence[str], compare: str, sizes: Mapping[str, Sequence[Any]], run: Callable[..., list[T]],
    device: torch.device,
) -> tuple[list[T], Ceilings]:  # fmt: skip
    """Results of `bench_decode` or `bench_prefill` for every model at all `sizes`, and the ceilings of the device."""
    models = read_models(presets, compare.split(","))
    results, parts = [], list(product(models, *sizes.values()))
    with BenchProgress(len(parts)) as progress:
        ceilings = measure_ceilings(device)
        for name, *chosen in parts:
            settings = dict(zip(sizes, chosen, strict=True))
            results += run(name, models[name], device, **settings, tell=progress.tell)
            progress.finish_part()
    return results, ceilings


def print_decode(console: Console, results: Sequence[DecodeResult], ceilings: Ceilings) -> None:
    """Print one row per model, batch size and case, with ratios to the first case."""
    measured = ("batch", "step µs", "p10–p90", "time ×", "tokens/s", "kernels", "GB/s", "of copy")
    table = new_table(("model", "case", "engine"), measured)
    for result in results:
        rate = result.bytes_per_second
        table.add_row(
            result.model,
            result.case,
            result.engine,
            str(result.batch),
            f"{result.step.median * 1e6:,.1f}",
            f"{result.step.p10 * 1e6:,.1f}–{result.step.p90 * 1e6:,.1f}",
            f"{result.ratio:.3f}",
            f"{result.batch / result.step.median:,.0f}",
            number(result.kernels, "d"),
            f"{rate / 1e9:,.0f}",
            f"{rate / ceilings.copy_bytes_per_second:.0%}",
        )
    console.print(table)
    console.print(
        "GB/s: weights and cache, each read once per step. of copy: GB/s as a share of the copy bandwidth, which "
        "counts bytes read and written. kernels: launches per step.",
        soft_wrap=True,
    )


def print_prefill(console: Console, results: Sequence[PrefillResult]) -> None:
    """Print one row per model, prompt size and case, with ratios to the first case."""
    measured = ("prompts", "first token ms", "p10–p90", "time ×", "tokens/s", "MFU", "first call s")
    table = new_table(("model", "case", "engine"), measured)
    for result in results:
        table.add_row(
            result.model,
            result.case,
            result.engine,
            f"{result.batch} × {result.length:,}",
            f"{result.first_token.median * 1e3:,.2f}",
            f"{result.first_token.p10 * 1e3:,.2f}–{result.first_token.p90 * 1e3:,.2f}",
            f"{result.ratio:.3f}",
            f"{result.tokens_per_second:,.0f}",
            number(result.mfu, ".1%"),
            f"{result.first_call:.2f}",
        )
    console.print(table)
    console.print(
        "first token: from the prompts on the host to the first new tokens on the host. first call: before "
        "any kernel is loaded.",
        soft_wrap=True,
    )
