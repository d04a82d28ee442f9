"""`python -m tests.diagnose.sweep`: diagnoses every causal language model of transformers and compares with hooks.

Each architecture is a tiny random model (architectures.py). The records of `residua diagnose` are compared with
forward hooks on a copy that runs transformers' eager attention: the loss, the input and output of every layer, the
attention maps, the experts chosen. Then three defects are planted (a residual sink, a dead feed-forward, an attention
sink) and have to be found; the untouched model must have none. The results go to
docs/results/diagnose-architectures.json and, as a table, to docs/diagnose-architectures.md.
`--only NAME …` measures these again and keeps the rest, `--missing` measures what the file does not have, and `--page`
writes the table alone.
"""

import argparse
import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.diagnose import ModelDiagnosis, diagnose_model
from residua.diagnose.huggingface import HuggingFaceSubject
from residua.diagnose.text import Sample
from residua.files import write_atomically
from tests.diagnose import architectures
from tests.diagnose.eager import Eager, plant_sink
from tests.diagnose.planted import sample_of
from tests.ops.harness import relative

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "diagnose-architectures.json"
PAGE = ROOT / "docs" / "diagnose-architectures.md"
OUTLIER = 5
BEFORE_THE_SINK = ("granite_swa", "granitemoe_swa")
"""Here transformers returns attention maps without the learned sink's share: the loss alone is compared."""
TOLERANCE = 2e-5
"""Relative to the size of the compared values; everything runs in float32."""


COMPARED = {
    "loss": "the loss",
    "states": "the input of each layer",
    "outputs": "the outputs of a layer's sublayers, and the layer's change",
    "attention": "by head: what each key receives, the entropy, the learned sink",
    "experts": "the load of each expert",
}


def examine(kind: str) -> dict[str, Any]:
    """One row of the table: comparisons, findings, and metrics not measured, with reasons."""
    sample = sample_of(architectures.rows())
    model = architectures.build(kind)
    row: dict[str, Any] = {"class": type(model).__name__}
    try:
        subject = HuggingFaceSubject(again(model, kind), kind)
    except ValueError as error:
        return row | {"refused": str(error)}
    row |= compare(subject, Eager(again(model, kind), sample), sample)
    row["control"] = defects(diagnose_model(subject, sample))
    row["skipped"] = [reason for reason in subject.skipped if not reason.startswith("Depth weights")]
    return row | planted(model, kind, sample)


def again(model: Any, kind: str) -> Any:
    """A copy, rebuilt if a model keeps states of its last pass, which cannot be copied."""
    try:
        return copy.deepcopy(model)
    except RuntimeError:
        made = architectures.build(kind)
        made.load_state_dict(model.state_dict())
        return made


def compare(subject: HuggingFaceSubject, truth: Eager, sample: Sample) -> dict[str, Any]:
    """The largest differences, relative to the size of the compared values."""
    seen = subject.observe(sample.tokens, sample.targets)
    found: dict[str, Any] = {"loss": abs(seen.loss - truth.loss) / truth.loss, "layers": subject.layers}
    first = {n: next(s.index for s in subject.sites if s.layer == n) for n in range(subject.layers)}
    known = [n for n in first if first[n] in seen.states and n in truth.inputs]
    if not seen.streams:
        found["states"] = max((relative(seen.states[first[n]], truth.inputs[n]) for n in known), default=None)
        partial = listed_layers(subject.skipped, "Part of layers")
        written = {n: [seen.outputs[s.index] for s in subject.sites if s.layer == n] for n in known if n not in partial}
        errors = [relative(torch.stack(y).sum(0), truth.outputs[n] - truth.inputs[n]) for n, y in written.items()]
        found["outputs"] = max(errors, default=None)
    found["sublayers"] = sorted({site.kind for site in subject.sites})
    if seen.attention and subject.model.config.model_type not in BEFORE_THE_SINK:
        found["attention"] = max(attention_error(seen.attention[n], truth.maps.get(n)) for n in seen.attention)
    found["attention_layers"] = [len(seen.attention), len(truth.maps)]
    if seen.loads:
        errors = [float((seen.loads[n] - truth.load(n, len(seen.loads[n]))).abs().max()) for n in seen.loads]
        found["experts"] = max(errors)
    return found


def attention_error(sums: Any, maps: list[Tensor] | None) -> float:
    """The largest difference of the attention to a key, the entropy and the learned sink, as means over queries."""
    if not maps:
        return float("nan")
    weights = torch.cat(maps, 1).double()
    if weights.shape[1] != sums.received.shape[1]:
        return float("nan")
    queries = weights.shape[2]
    return max(
        float((sums.received - weights.sum(2)).abs().max() / queries),
        float((sums.entropy - torch.special.entr(weights).sum((2, 3))).abs().max() / queries),
        float((sums.outside - (1 - weights.sum(-1)).sum(-1)).abs().max() / queries),
    )


def defects(made: ModelDiagnosis) -> list[str]:
    """The findings in short: kind and place."""
    return sorted(f"{f.kind} {f.where}" for f in made.findings if f.kind not in ("learned_sink", "chance_level_loss"))


@torch.no_grad()
def planted(model: Any, kind: str, sample: Sample) -> dict[str, Any]:
    """Plant all three defects in one model; return the findings of the hooks and those of the diagnosis."""
    model.get_input_embeddings().weight[:, OUTLIER] = 41.0
    subject = HuggingFaceSubject(again(model, kind), kind)
    last = [s for s in subject.sites if s.layer == subject.layers - 1]
    parts = [s for s in last if s.kind in ("feed-forward", "mixture of experts")]
    name = module_name(subject, parts[-1].index) if parts else None
    own = {id(parameter) for parameter in subject.parameters_of(parts[-1])} if parts else set()
    for place, parameter in subject.model.named_parameters():
        if id(parameter) in own:
            model.get_parameter(place).zero_()
    plant_sink(model, sample)
    truth = Eager(again(model, kind), sample, name)
    made = diagnose_model(HuggingFaceSubject(model, kind), sample)
    there = truth.outlier(OUTLIER) | (truth.sinks() if made.attention else set())
    if truth.silent:
        whole = {f"dead_layer {{'layer': {last[0].layer}}}"}
        there |= whole if len(last) == 1 else {f"dead_sublayer {{'sublayer': {parts[-1].index}}}"}
    found = set(defects(made))
    return {"planted": sorted(there), "missed": sorted(there - found), "extra": sorted(found - there)}


def module_name(subject: HuggingFaceSubject, site: int) -> str:
    """The name of a sublayer's module, by which a copy of the model has it too."""
    return next(name for name, module in subject.model.named_modules() if module is subject._bodies[site])


def listed_layers(skipped: Sequence[str], start: str) -> set[int]:
    found = [re.findall(r"\d+", reason.partition(":")[0]) for reason in skipped if reason.startswith(start)]
    return {int(number) for numbers in found for number in numbers}


def faults(row: dict[str, Any]) -> list[str]:
    """Problems of a row: differences beyond rounding, missed defects, false alarms."""
    found = [key for key in COMPARED if (value := row.get(key)) is not None and not value <= TOLERANCE]
    measured, maps = row.get("attention_layers", (0, 0))
    if measured < maps and not any(reason.startswith("Attention metrics") for reason in row["skipped"]):
        found.append("attention not measured, without a reason")
    found += [f"missed {defect}" for defect in row.get("missed", [])]
    return found + [f"made up {defect}" for key in ("extra", "control") for defect in row.get(key, [])]


def page(results: dict[str, Any]) -> str:
    """The measurement as a page of the documentation: exact metrics, and missing ones by architecture."""
    rows: dict[str, dict[str, Any]] = results["architectures"]
    measured = {kind: row for kind, row in rows.items() if "loss" in row}
    refused = {kind: row["refused"] for kind, row in rows.items() if "refused" in row}
    planted, missed = (sum(len(row[key]) for row in measured.values()) for key in ("planted", "missed"))
    extra = sum(len(row["extra"]) + len(row["control"]) for row in measured.values())
    total, left_out = len(rows) + len(results["left_out"]), len(results["left_out"])
    lines = [
        "# Which Hugging Face models can be diagnosed?",
        "",
        f"transformers {results['transformers']} has {total} causal language models. `residua diagnose` opens "
        f"{len(measured)} of them and refuses {len(refused)} with one sentence; {left_out} do not run on text alone.",
        "",
        "Each was tried as a tiny random model (2 layers, width 32, 64 tokens; more layers where two do not show "
        "every kind). A copy with hooks and eager attention gives the truth. Largest relative differences in float32:",
        "",
        "| | what is compared | largest difference |",
        "|---|---|---:|",
        *(f"| {key} | {COMPARED[key]} | {worst(measured, key)} |" for key in COMPARED),
        "",
        f"Then {planted} defects were planted: a large embedding dimension, a dead sublayer, an attention sink. The "
        f"diagnoses missed {missed} of them and named {extra} that are not there.",
        "",
        "`python -m tests.diagnose.sweep` measures everything again in two to three minutes on one core, and `make "
        "nightly` repeats it. [diagnose-architectures.json](results/diagnose-architectures.json) has the numbers of "
        "every model.",
        "",
        "## Measured in full",
        "",
        listed([kind for kind, row in measured.items() if not row["skipped"]]),
        "",
        "## Measured in part",
        "",
        "`diagnose` gives the reason on its page.",
        "",
    ]
    for reason in sorted({reason for row in measured.values() for reason in map(gap, row["skipped"])}):
        lines += [f"- **{reason}**: {listed([k for k, row in measured.items() if reason in map(gap, row['skipped'])])}"]
    lines += [
        "",
        "## Refused",
        "",
        *(f"- `{kind}`: {reason}" for kind, reason in refused.items()),
        "",
        "## Not run",
        "",
        *(f"- `{kind}`: {reason}." for kind, reason in results["left_out"].items()),
    ]
    return "\n".join(lines) + "\n"


def gap(reason: str) -> str:
    """A reason for not measuring something, without the layers of this model."""
    return re.sub(r" of layers [\d, ]*\d", "", reason).partition(";")[0].rstrip(".")


def listed(kinds: Sequence[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds) + "."


def worst(rows: dict[str, dict[str, Any]], key: str) -> str:
    return short(max(row[key] for row in rows.values() if row.get(key) is not None))


def short(value: float | None) -> str:
    return "—" if value is None else "0" if value == 0 else f"{value:.0e}"


def main() -> None:
    """Measure, save after each architecture, and write the page."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not options.page:
        torch.set_num_threads(1)
        results |= {"transformers": transformers.__version__, "torch": torch.__version__}
        results["left_out"] = architectures.LEFT_OUT
        rows = results.setdefault("architectures", {})
        done = {*architectures.LEFT_OUT, *(rows if options.missing else ())}
        for kind in options.only or [kind for kind in architectures.types() if kind not in done]:
            rows[kind] = examine(kind)
            print(kind, faults(rows[kind]) or rows[kind].get("refused", "right"), flush=True)
            known = sorted(set(architectures.types()) & set(rows))
            results["architectures"] = {kind: rows[kind] for kind in known}
            write_atomically(RESULTS, json.dumps(results, indent=1) + "\n")
    write_atomically(PAGE, page(results))


if __name__ == "__main__":
    main()
