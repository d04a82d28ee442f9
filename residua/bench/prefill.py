"""Time to the first token: prompts of one length are read into an empty cache, several models side by side.

The models take turns in every round, so that a change of the device's clock affects all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console

from residua import ops
from residua.bench.decode import build_random
from residua.bench.show import Tell, number
from residua.bench.step import Case
from residua.bench.timing import Ceilings
from residua.config.model import ModelConfig
from residua.generate.engine import engine_for
from residua.generate.generator import MULTIPLE, first_logits, prompt_reader
from residua.model.size import measure
from residua.report.terminal import new_table
from residua.train.timing import Sample, peak_flops, release_memory, time_each

PEER = "transformers"


@dataclass(frozen=True)
class PrefillResult:
    """The time from `batch` prompts of `length` tokens on the host to their first new tokens on the host.

    `ratio` is to the first model. `first_call` is the time of the first prompts that the process read with this model,
    which includes loading or compiling kernels. MFU is the model's FLOPs per second as a share of the device's peak;
    on a CPU it is not known.
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
        """Tokens of the prompts read per second."""
        return self.batch * self.length / self.first_token.median


@dataclass
class _Contender:
    name: str
    engine: str
    run: Callable[[], object]
    backend: Callable[[], AbstractContextManager[object]]
    flops: float
    first_call: float = 0.0
    seconds: list[float] = field(default_factory=list)


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
    """Time every case `rounds` times, ratios to the first; with `peers`, transformers' Llama of its shape too."""
    torch.manual_seed(0)
    rows = torch.randint(cases[0].config.model.vocab_size, (batch, length)).tolist()
    contenders = []
    for done, case in enumerate(cases):
        tell(f"{model}, {batch} × {length}: building {case.name}", done / len(cases) / 2)
        contenders.append(_ours(case, device, rows, engine))
    peer = _llama(cases[0].config.model, device, rows, contenders[0].flops) if peers else None
    contenders += [] if peer is None else [peer]
    for contender in contenders:
        with contender.backend():
            began = time.perf_counter()
            contender.run()
            contender.first_call = time.perf_counter() - began
            contender.run()
    for done in range(rounds):
        tell(f"{model}, {batch} × {length}: round {done + 1} of {rounds}", (1 + done / rounds) / 2)
        for contender in contenders:
            with contender.backend():
                contender.seconds += time_each(contender.run, 1, device)
    samples = [Sample.of(c.seconds) for c in contenders]
    peak = peak_flops(device)
    results = [
        PrefillResult(
            model=model,
            case=c.name,
            batch=batch,
            length=length,
            engine=c.engine,
            first_token=sample,
            ratio=sample.median / samples[0].median,
            flops=c.flops,
            mfu=None if peak is None else c.flops / sample.median / peak,
            first_call=c.first_call,
        )
        for c, sample in zip(contenders, samples, strict=True)
    ]
    contenders.clear()
    release_memory(device)
    return results


def _ours(case: Case, device: torch.device, rows: list[list[int]], engine: str) -> _Contender:
    model = build_random(case, device)
    engine = engine_for(model, engine)
    reader = prompt_reader(model, engine)
    cache = model.new_cache(len(rows), len(rows[0]) + MULTIPLE)

    def run() -> object:
        cache.clear()
        return first_logits(model, reader, cache, rows).argmax(-1).tolist()

    flops = prefill_flops(case.config.model, len(rows), len(rows[0]))
    return _Contender(case.name, engine, run, lambda: ops.backend(case.backend), flops)


def prefill_flops(config: ModelConfig, batch: int, length: int) -> float:
    """Two per multiply-add of every active weight and of causal attention; the head counts for the last tokens only."""
    head = 2 * config.vocab_size * config.width
    each = measure(config.override([f"context={length}"])).flops_per_token / 3 - head
    return batch * (length * each + head)


def _llama(config: ModelConfig, device: torch.device, rows: list[list[int]], flops: float) -> _Contender | None:
    """A Llama with as many weights in attention and feed-forward as a dense softmax model; None if there is none."""
    softmax, ffn = config.softmax, config.ffn
    if find_spec(PEER) is None or softmax is None or ffn.mixture:
        return None
    import transformers

    shape: Any = transformers.LlamaConfig
    made = shape(
        vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.layers,
        intermediate_size=ffn.hidden if ffn.gated else 2 * ffn.hidden // 3, num_attention_heads=softmax.heads,
        num_key_value_heads=softmax.kv_heads or softmax.heads, head_dim=softmax.head_dim or None,
        max_position_embeddings=max(config.context, len(rows[0])), tie_word_embeddings=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        llama: Any = transformers.LlamaForCausalLM(made)
    llama = llama.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()

    def run() -> object:
        tokens = torch.tensor(rows, device=device)
        return llama(tokens, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

    return _Contender(f"{PEER} Llama", "eager", run, nullcontext, flops)


def print_prefill(console: Console, results: Sequence[PrefillResult]) -> None:
    """One row per model, size of the prompts and case, ratios to the first case."""
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
        "first token: from the prompts on the host to the first new tokens on the host. first call: with kernels that "
        "are not loaded yet.",
        soft_wrap=True,
    )


def prefill_report(
    environment: dict[str, Any], ceilings: Ceilings, settings: dict[str, Any], results: Sequence[PrefillResult]
) -> dict[str, Any]:
    """Everything as plain JSON: seconds and FLOPs."""
    return {
        "kind": "prefill",
        "environment": environment,
        "ceilings": asdict(ceilings),
        "settings": settings,
        "results": [asdict(result) | {"tokens_per_second": result.tokens_per_second} for result in results],
    }
