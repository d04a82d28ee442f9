"""The Python interface: `diagnose` for folders, `diagnose_model` for a model in memory, `taps` for tensors."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from residua.diagnose.folder import check_folder, is_model_folder, open_subject
from residua.diagnose.metric import Metric, on_page
from residua.diagnose.metrics.removal import Budget, measure, planned
from residua.diagnose.observe import Subject
from residua.diagnose.page import NOT_TRAINED, Trained, diagnosis_page
from residua.diagnose.schema import Diagnosis, ModelDiagnosis, with_metrics
from residua.diagnose.sentences import summary
from residua.diagnose.text import DEFAULT_TOKENS, Sample, open_text, sample
from residua.errors import UserError
from residua.files import keeping, refuse_blocked, write_atomically
from residua.machine import choose_device
from residua.model import taps as published
from residua.model.decoder import Decoder
from residua.reading import ReadError, Shape, read_json
from residua.storage.model_folder import open_tokenizer
from residua.storage.run import METRICS, read_metrics
from residua.train.telemetry_curves import telemetry_of

Device = Literal["auto", "cpu", "cuda"]
JSON, PAGE = "diagnosis.json", "report.html"
TOKENS_AT_ONCE = 2048
SCORED_ON_GPU = 16_384
"""Tokens per GPU pass when nothing is recorded; with fewer, the host could not keep the GPU busy."""
ABLATION_TOKENS = 4096

Progress = Callable[[str, int, int], None]


def diagnose(
    models: Sequence[str | Path],
    out: str | Path,
    *,
    text: str | Path | None = None,
    tokens: int = DEFAULT_TOKENS,
    length: int | None = None,
    ablations: Budget = "layers",
    ablation_tokens: int = ABLATION_TOKENS,
    device: Device = "auto",
    extra: Sequence[type[Metric]] = (),
    maps: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Diagnosis:
    """Diagnose model folders on the same text and write `diagnosis.json` and `report.html` to `out`.

    `text` is a text file or a prepared dataset; the default is the validation text of the first run. `extra` adds your
    own metrics to those of this package. `maps` adds a map of tokens and dimensions for every layer.
    """
    paths = [Path(model) for model in models]
    names = _names(paths)
    where = choose_device(device, "--device")
    for path in paths:
        check_folder(path)
    source = open_text(None if text is None else Path(text), paths)
    _check_out(Path(out), paths)
    diagnoses = []
    for path, name in zip(paths, names, strict=True):
        subject = open_subject(path, where)
        subject.name = name
        shown = sample(
            open_tokenizer(path), text=source, tokens=tokens, length=length,
            context=subject.context, vocabulary=subject.vocabulary,
        )  # fmt: skip
        diagnoses.append(diagnose_model(
            subject, shown, path=str(path), ablations=ablations, ablation_tokens=ablation_tokens, extra=extra,
            maps=maps, progress=progress,
        ))  # fmt: skip
        del subject
    result = Diagnosis(models=diagnoses)
    write(result, Path(out), {name: _telemetry(path) for path, name in zip(paths, names, strict=True)})
    return result


def diagnose_model(
    subject: Subject,
    sample: Sample,
    *,
    path: str = "",
    ablations: Budget = "layers",
    ablation_tokens: int = ABLATION_TOKENS,
    extra: Sequence[type[Metric]] = (),
    maps: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> ModelDiagnosis:
    """Measure one model on one sample of text, with this package's metrics and those in `extra`.

    `maps` adds the metrics that are only measured on request.
    """
    start = time.monotonic()
    schema = with_metrics(tuple(extra))
    metrics = {metric: metric(subject, sample) for metric in schema.metrics if maps or not metric.on_request}
    loss = _observe(subject, sample, list(metrics.values()), progress)
    facts = {key: value for metric in metrics.values() for key, value in metric.facts()}
    skipped = [*subject.skipped, *(reason for metric in metrics.values() for reason in metric.skipped)]
    if ablations == "none":
        skipped.append("Removal of layers, sources and heads: skipped because of --ablations none.")
    few = sample.first(ablation_tokens)
    plan = planned(subject, ablations, [k for metric in metrics.values() for k in metric.suspects()])
    ticks = iter(range(1, len(plan) + 1))
    on_gpu = next(subject.model.parameters()).is_cuda
    at_once = SCORED_ON_GPU if on_gpu else TOKENS_AT_ONCE
    removed = measure(subject, plan, few, at_once, lambda: progress("removing", next(ticks), len(plan)))
    diagnosis = schema(
        name=subject.name,
        path=path,
        description=subject.description,
        parameters=sum(p.numel() for p in subject.model.parameters()),
        layers=subject.layers,
        width=subject.width,
        state_name=subject.state_name,
        text=sample.facts,
        device=_device_name(subject),
        precision=_precision(subject),
        seconds=time.monotonic() - start,
        loss=loss,
        ablation_tokens=few.tokens.numel() if plan else 0,
        **facts,
        ablations=removed,
        skipped=skipped,
    )
    measured = [metrics[metric] for metric in on_page(diagnosis) if metric in metrics]
    findings = [
        finding
        for metric in sorted(measured, key=lambda metric: not metric.defect)
        for finding in metric.findings(diagnosis)
    ]
    diagnosis = schema.model_validate(dict(diagnosis) | {"findings": findings})
    return diagnosis.model_copy(update={"summary": summary(diagnosis)})


def _observe(subject: Subject, sample: Sample, metrics: Sequence[Metric], progress: Progress) -> float:
    """Run the model on the whole sample in batches and return its mean loss."""
    batches = list(sample.batches(TOKENS_AT_ONCE))
    total = 0.0
    for done, (tokens, targets) in enumerate(batches):
        total += _observe_batch(subject, tokens, targets, metrics) * tokens.numel()
        progress("looking", done + 1, len(batches))
    return total / sample.tokens.numel()


def _observe_batch(subject: Subject, tokens: Tensor, targets: Tensor, metrics: Sequence[Metric]) -> float:
    """Return the loss of one batch. A separate function frees each large observation before the next one."""
    device = next(subject.model.parameters()).device
    observation = subject.observe(tokens.to(device), targets.to(device))
    if not math.isfinite(observation.loss):
        raise UserError(
            f"{subject.name} gives a loss of {observation.loss} on this text, so its weights are broken: use "
            "another copy or checkpoint."
        )
    for metric in metrics:
        metric.add(observation)
    return observation.loss


def _precision(subject: Subject) -> str:
    """The dtype of most weights."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in subject.model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.")


def _device_name(subject: Subject) -> str:
    device = next(subject.model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def write(diagnosis: Diagnosis, out: Path, trained: Trained = NOT_TRAINED) -> None:
    """Write both files of a diagnosis; `trained` holds the training telemetry of the models that are runs."""
    write_atomically(out / JSON, diagnosis.model_dump_json(indent=1), parents=True)
    with keeping(f"{out / JSON} has the numbers"):
        diagnosis_page(diagnosis, trained).write(out / PAGE)


def _telemetry(folder: Path) -> list[dict[str, Any]]:
    """Read a run's training telemetry; empty if it is missing or damaged, since a diagnosis does not need it."""
    try:
        return telemetry_of(read_metrics(folder / METRICS))
    except (ReadError, OSError):
        return []


def _check_out(out: Path, models: Sequence[Path]) -> None:
    """Refuse to overwrite another command's page or another model's diagnosis, or to write among unrelated files."""
    refuse_blocked(out)
    if (out / JSON).exists():
        _check_own(out, models)
        return
    if not out.is_dir():
        return
    if (out / PAGE).exists():
        raise UserError(f"{out / PAGE} was not written by a diagnosis: choose another folder with --out.")
    stranger = min((path.name for path in out.iterdir() if path.is_file()), default=None)
    if stranger is not None and out.resolve() not in [model.resolve() for model in models]:
        raise UserError(f"{out} has {stranger} but no diagnosis: choose another --out.")


class _Diagnosed(Shape):
    path: str


class _Before(Shape):
    models: list[_Diagnosed]


def _check_own(out: Path, models: Sequence[Path]) -> None:
    """Refuse to replace the diagnosis in a model's folder with one of other models."""
    if not is_model_folder(out):
        return
    before = read_json(out / JSON, _Before, "remove it, or choose another --out", lenient=True).models
    named = [model.resolve() for model in models]
    again = len(before) == 1 and named == [out.resolve()]  # the same model, even if its folder was moved since
    if not again and named != [Path(model.path).resolve() for model in before]:
        raise UserError(
            f"{out} is a model folder with a diagnosis of other models: choose another --out, or delete its "
            f"{JSON} and {PAGE}."
        )


def _names(paths: Sequence[Path]) -> list[str]:
    """Shorten each folder's path to its last parts that make it unique.

    If a folder is given twice, its names are numbered.
    """
    parts = [path.resolve().parts for path in paths]
    names = [str(Path(*tail[-_depth(tail, set(parts)) :])) for tail in parts]
    numbered = [f"{name} ({names[:index].count(name) + 1})" for index, name in enumerate(names)]
    return [name if names.count(name) == 1 else other for name, other in zip(names, numbered, strict=True)]


def _depth(path: tuple[str, ...], parts: Collection[tuple[str, ...]]) -> int:
    """Return the smallest number of trailing parts that no other path ends in."""
    return next(n for n in range(1, len(path) + 1) if sum(other[-n:] == path[-n:] for other in parts) == 1)


class _Chosen(dict[str, Tensor]):
    """Stores only the names that match one of the patterns."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self.patterns = patterns

    def __setitem__(self, name: str, value: Tensor) -> None:
        if any(fnmatchcase(name, pattern) for pattern in self.patterns):
            super().__setitem__(name, value)


@contextmanager
def taps(model: Decoder, *patterns: str) -> Iterator[dict[str, Tensor]]:
    """Record the tensors that a Residua model publishes during forward passes inside the block, by name (docs/taps.md).

    with residua.diagnose.taps(model, "depth.*.weights") as seen:
        model(tokens)
    seen["depth.3.weights"]                        # [B, T, sources]

    Without patterns, everything is recorded. Tensors keep their autograd graph. Outside the block, nothing is recorded
    and nothing extra is computed. Run only one model inside it, since a second one would use the same names.
    """
    if not isinstance(model, Decoder):
        raise UserError(f"{type(model).__name__} has no taps: only Residua models (residua.build) have them.")
    with published.record(_Chosen(patterns or ("*",))) as tensors:
        yield tensors
