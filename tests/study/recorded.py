"""Run folders with known content, written as the trainer writes them, so that results can be checked by hand."""

import json
import math
from collections.abc import Callable
from typing import Any

from residua.study.plan import PlannedRun, StudyPlan

Curve = Callable[[PlannedRun, int], float]


def write_run(
    run: PlannedRun,
    loss: Curve,
    *,
    rate: float = 1000.0,
    inspection: dict[str, Any] | None = None,
    final: dict[str, Any] | None = None,
) -> None:
    """A complete run: a train row and a validation row every tenth of its steps, at `rate` tokens per second."""
    run.folder.mkdir(parents=True)
    (run.folder / "config.toml").write_text(run.config.to_toml())
    steps, per_step = run.config.train.steps, run.config.tokens_per_step
    rows = []
    for step in range(steps // 10, steps + 1, steps // 10):
        tokens, value = step * per_step, loss(run, step)
        common = {"step": step, "loss": value, "seconds": tokens / rate}
        rows.append({"kind": "train", **common, "tokens": tokens, "tokens_per_second": rate, "memory_gib": 0.5})
        rows.append({"kind": "validation", **common, "bits_per_byte": value / math.log(2) / 3, "tokens": 4096})
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if final is not None:
        (run.folder / "validation.json").write_text(json.dumps(final))
    (run.folder / "inspection.json").write_text(json.dumps(inspection or look_inside(run)))


def write_all(plan: StudyPlan, loss: Curve, rates: dict[str, float] | None = None) -> None:
    """Every run of a plan, complete."""
    for run in plan.runs:
        write_run(run, loss, rate=(rates or {}).get(run.variant, 1000.0))


def look_inside(run: PlannedRun) -> dict[str, Any]:
    """An inspection in the trainer's format, with the sections that the variant would have."""
    model = run.config.model
    found: dict[str, Any] = {
        "tokens": 512,
        "sublayers": [
            {"sublayer": k, "output_rms": 0.3 * 1.3**k, "gradient_rms": 1e-3 / (k + 1)} for k in range(model.sublayers)
        ],
    }
    readers = list(range(model.sublayers))
    if model.topology.kind != "additive":
        rows = [[1.0 / (k + 2)] * (k + 2) for k in readers]
        found["depth_weights"] = {"readers": readers, "mean": rows}
    if model.topology.kind == "multi_gate":
        found["beta"] = [{"sublayer": k, "mean": [0.1, 0.2, 0.05, 0.3]} for k in readers[3:]]
    if model.ffn.kind == "moe":
        found["experts"] = [{"layer": k, "load": [0.4, 0.3, 0.2, 0.1]} for k in range(model.layers)]
    if getattr(model.attention, "gate", "none") != "none":
        found["gates"] = [{"layer": k, "mean": 0.5, "closed": 0.1 * k} for k in range(model.layers)]
    return found
