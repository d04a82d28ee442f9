"""Write the plans for 8 to 4096 GPUs into docs/lab/plans.md, between their two marks: `make scale`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from residua.bench.plan import GIB, Machine, MeshPlan, plan
from residua.config.run import RunConfig

PAGE = Path(__file__).parents[1] / "docs" / "lab" / "plans.md"
BEGIN, END = "<!-- plans: written by `make scale` -->\n", "<!-- end of plans -->\n"
MACHINE = Machine(140 * GIB, 500e12, 300e9)

SMALL = ["train.micro_batch=16", "train.accumulate=256"]
LARGE = ["model.width=4096", "model.layers=32", "model.attention.heads=32", "model.attention.kv_heads=8",
         "model.ffn.hidden=14336", "train.micro_batch=2", "train.accumulate=512"]  # fmt: skip
MODELS = {
    "0.8 B additive": ("mgr-l-prenorm", SMALL),
    "0.8 B Block": ("mgr-l-block8", SMALL),
    "0.8 B MGR": ("mgr-l-competitive4", SMALL),
    "8 B additive": ("outlier-2b-full", LARGE),
    "8 B MGR": ("outlier-2b-full", [*LARGE, "model.topology={kind='multi_gate',streams=4}"]),
}


def lines() -> list[str]:
    """The table."""
    models = {name: RunConfig.find(preset).override(changes) for name, (preset, changes) in MODELS.items()}
    return list(scale_tables(models, MACHINE))


def scale_tables(models: Mapping[str, RunConfig], machine: Machine) -> Iterator[str]:
    """Lines of Markdown: the fastest mesh of each model for 8 to 4096 devices, also with torchtitan's axes if faster.

    The step stays the same; where there are more devices than micro-batches, these become smaller. `share` is the speed
    of a device relative to 8 devices.
    """
    head = ("GPUs", "model", "data × shard × pipeline", "tensor × context", "GiB", "sent GiB", "slowest", "bubble",
            "step ms", "tokens/s", "share")  # fmt: skip
    yield f"| {' | '.join(head)} |"
    yield f"|---:|{'---|' * 3}{'---:|' * (len(head) - 4)}"
    for name, config in models.items():
        first: float | None = None
        for gpus in (8, 64, 512, 4096):
            sequences = config.train.accumulate * config.train.micro_batch
            micro = min(config.train.micro_batch, max(1, sequences // gpus))
            sized = config.override([f"train.micro_batch={micro}", f"train.accumulate={sequences // micro}"])
            plans = plan(sized, gpus, machine, engines=True)
            best = next((p for p in plans if p.tensor * p.context == 1), None)  # none if micro-batches are too few
            for p in (best, plans[0]) if best not in (None, plans[0]) else plans[:1]:
                speed = sized.tokens_per_step / p.seconds
                first = first or speed / gpus
                yield f"| {' | '.join(_scale_cells(p, name, speed, speed / gpus / first))} |"


def _scale_cells(p: MeshPlan, name: str, speed: float, share: float) -> list[str]:
    stages = f", {p.parallel.stages} stages" if p.parallel.stages_per_rank > 1 else ""
    return [
        str(p.ranks), name, f"{p.parallel.data} × {p.parallel.shard} × {p.parallel.pipeline}{stages}",
        f"{p.tensor} × {p.context}", f"{p.memory / GIB:.1f}" + " (too large)" * (not p.fits),
        f"{p.sent.total / GIB:.2f}", f"{p.slowest:.2f}", f"{p.bubble:.0%}", f"{p.seconds * 1e3:,.0f}",
        f"{speed:,.0f}", f"{share:.0%}",
    ]  # fmt: skip


def main() -> None:
    """Replace what stands between the marks."""
    table = "\n".join(lines())
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
