"""Write the plans for 8 to 4096 GPUs into docs/scale.md, between their two marks: `make scale`."""

from __future__ import annotations

from pathlib import Path

from residua.bench.plan import GIB, Machine
from residua.bench.plan_table import scale_tables
from residua.config.run import RunConfig

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
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


def main() -> None:
    """Replace what stands between the marks."""
    table = "\n".join(lines())
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
