"""Quantize the model of a folder: evaluate, write the quantized folder and the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from residua.errors import UserError
from residua.files import keeping, refuse_used
from residua.machine import choose_device
from residua.model.decoder import Decoder
from residua.quantize.engine import require_served, save_engine, served_dtype
from residua.quantize.evaluate import CALIBRATION_SEQUENCES, CalibrationText, Evaluation
from residua.quantize.modules import targets
from residua.quantize.recipe import check_alpha
from residua.quantize.result import QuantizationResult
from residua.quantize.schemes import find_scheme
from residua.quantize.store import files_to_copy, is_quantized, save_quantized
from residua.report.terminal import StageProgress
from residua.storage.load import load, open_stored
from residua.storage.model_folder import require_model

Device = Literal["auto", "cpu", "cuda"]
RESULTS, REPORT = "results.json", "report.html"
PROBES = 3


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    scheme: str = "fp8",
    alpha: float | None = None,
    inside: bool = False,
    exempt: Sequence[str] = (),
    engine: str | Path | None = None,
    data: str | Path | None = None,
    calibration: int = CALIBRATION_SEQUENCES,
    tokens: int | None = None,
    probes: int = PROBES,
    device: Device = "auto",
    progress: StageProgress = lambda stage, done, total: None,
) -> QuantizationResult:
    """Quantize the model of a folder into `out`, with results.json and report.html.

    `alpha` turns SmoothQuant on, `inside` extends it into sublayers. Modules whose names match `exempt` stay in high
    precision. For the `probes` worst modules, the gain from exempting each is measured. `tokens` limits the validation
    set, `calibration` is the number of training sequences for calibrating SmoothQuant and static scales. `engine` is a
    second folder for serving engines, in the layout of Qwen3, Llama, Qwen2 or Mistral, if the model fits one.
    Unquantized tensors are then rounded to that folder's dtype, also in `out` and in the measured loss.
    """
    source, target, chosen = Path(model), Path(out), find_scheme(scheme)
    _check_folders(target, None if engine is None else Path(engine))
    if alpha is not None:
        check_alpha(alpha, f"--smooth {alpha:g}")
    elif inside:
        raise UserError("--inside extends SmoothQuant: use it with --smooth.")
    require_model(source)
    if is_quantized(source):
        raise UserError(f"{source} is already quantized: name the original run or export.")
    files_to_copy(source)
    where = choose_device(device, "--device")
    decoder = load(source).to(where).eval()
    stored = stored_bytes(source, decoder)
    modules = targets(decoder, exempt)
    if engine is not None:
        require_served(decoder, modules, scheme)
    text = CalibrationText.of_folder(source, decoder.config, None if data is None else Path(data))
    evaluation = Evaluation(decoder, chosen, tuple(exempt), text, text.validation(tokens), progress)
    before = evaluation.loss("loss in high precision")
    folded = None if alpha is None else evaluation.smooth(alpha, calibration, inside)
    if engine is not None:
        evaluation.round_kept(served_dtype(scheme))
    evaluation.calibrate(calibration)
    result = QuantizationResult(
        model=str(source),
        scheme=chosen.name,
        bits=chosen.bits,
        words=chosen.words,
        alpha=alpha,
        inside=inside,
        calibration_sequences=0 if alpha is None and chosen.static is None else calibration,
        exempt=tuple(exempt),
        text=str(text.dataset.path),
        validation_tokens=sum(batch.tokens.numel() for batch in evaluation.validation),
        device=str(where),
        loss_before=before,
        loss_folded=folded,
        unsmoothed=() if alpha is None else tuple(evaluation.unsmoothed(inside)),
        bytes_before=stored,
        **evaluation.findings(probes),
    )
    about = {"alpha": alpha, "exempt": list(exempt), "source": str(source)}
    peaks = evaluation.peaks or input_peaks(result)
    save_quantized(target, source, decoder, evaluation.names, evaluation.chosen, scheme, peaks, about, results(result))
    if engine is not None:
        with keeping(f"{target} is complete"):
            save_engine(Path(engine), source, decoder, evaluation.chosen, scheme, peaks)
    return result


def stored_bytes(source: Path, model: Decoder) -> int:
    """Bytes of a folder's weights, in their stored dtypes."""
    dtypes = open_stored(source).dtypes
    parameters = model.named_parameters()
    return sum(parameter.numel() * dtypes.get(name, parameter.dtype).itemsize for name, parameter in parameters)


def input_peaks(result: QuantizationResult) -> dict[str, float]:
    """The largest input of each matrix, by module; the experts' last matrices have separate entries."""
    outer = {module.name: module.input_peak for module in result.modules}
    inner = {f"{m.name}.out": m.inner_peak for m in result.modules if m.inner_peak is not None}
    return outer | inner


def results(result: QuantizationResult) -> dict[str, str]:
    """Render results.json and report.html."""
    from residua.quantize.page import quantization_page

    return {RESULTS: result.model_dump_json(indent=1) + "\n", REPORT: quantization_page(result).html()}


def _check_folders(out: Path, engine: Path | None) -> None:
    """Refuse unusable output folders before any work is done."""
    refuse_used(out)
    if engine is not None:
        refuse_used(engine, "--engine")
        if engine.resolve() == out.resolve():
            raise UserError(f"--engine {engine} is the same as --out: name two folders.")
