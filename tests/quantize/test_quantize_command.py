"""`residua quantize` on trained models: the checkpoint, the report, the options and the refusals."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import residua
from residua.model.decoder import Decoder
from residua.ops.low_precision.nvfp4 import static_scale
from residua.quantize import quantize
from residua.quantize.evaluate import CalibrationText, largest_inputs, mean_loss
from residua.quantize.modules import LowProjection, quantize_model, targets
from residua.quantize.page import quantization_page
from residua.quantize.result import QuantizationResult, sentences
from residua.quantize.schemes import SCHEMES
from tests.quantize.conftest import OUTLIER
from tests.trained import residua as command

pytestmark = pytest.mark.slow


def loss_of(model: Decoder, run: Path) -> float:
    return mean_loss(model, CalibrationText.of_folder(run, model.config, None).validation())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_checkpoint_loads_with_the_reported_loss(scheme: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    result = quantize(run, out, scheme=scheme, probes=1, calibration=4)
    model = residua.load(out)
    assert isinstance(model.sublayers[0].body.project, LowProjection)
    assert loss_of(model, run) == result.loss_after
    assert loss_of(residua.load(run), run) == result.loss_before
    assert QuantizationResult(**json.loads((out / "results.json").read_text())) == result
    assert (out / "report.html").stat().st_size > 10_000
    assert result.bytes_after < result.bytes_before


def test_reported_loss_uses_the_folders_static_scales(run: Path, tmp_path: Path) -> None:
    result = quantize(run, tmp_path / "q", scheme="nvfp4-static", calibration=4, probes=0)
    assert result.calibration_sequences == 4
    model = residua.load(run).eval()
    text = CalibrationText.of_folder(run, model.config, None)
    peaks = largest_inputs(model, targets(model), text.calibration(4))
    stored = load_file(tmp_path / "q" / "model.safetensors")
    for name, peak in peaks.items():
        assert float(stored[f"{name}.input_global_scale"]) == static_scale(peak)
    evaluated = largest_inputs(model, targets(model), text.validation())
    assert any(evaluated[name] != peak for name, peak in peaks.items())
    assert "--scheme nvfp4-static --calibration 4" in (tmp_path / "q" / "report.html").read_text()


def test_fp8_costs_a_trained_model_less_than_nvfp4(run: Path, tmp_path: Path) -> None:
    costs = {}
    for scheme in ("fp8", "nvfp4"):
        result = quantize(run, tmp_path / scheme, scheme=scheme, probes=0)
        costs[scheme] = abs(result.loss_after - result.loss_before)
        assert max(m.error for m in result.modules) < {"fp8": 0.06, "nvfp4": 0.35}[scheme]
    assert costs["fp8"] < 0.02 and costs["fp8"] < costs["nvfp4"] < 0.5


def test_planted_outliers_are_named_and_removed_by_smoothing(planted: Path, run: Path, tmp_path: Path) -> None:
    plain = quantize(planted, tmp_path / "plain", scheme="nvfp4", probes=0)
    smooth = quantize(planted, tmp_path / "smooth", scheme="nvfp4", alpha=0.5, calibration=32, probes=0)
    assert math.isclose(plain.loss_before, loss_of(residua.load(run), run), rel_tol=1e-5)
    readers = [m for m in plain.modules if m.name.endswith((".project", ".up"))]
    assert all(m.outliers[0].channel == OUTLIER and m.outliers[0].ratio > 30 for m in readers)
    assert smooth.loss_folded is not None and abs(smooth.loss_folded - smooth.loss_before) < 1e-4
    before = {m.name: m.activation_error for m in readers}
    after = {m.name: m.activation_error for m in smooth.modules}
    assert all(after[name] < 0.7 * error for name, error in before.items())
    assert smooth.loss_after - smooth.loss_before < plain.loss_after - plain.loss_before


def test_exempt_modules_stay_exact_and_their_gain_is_reported(run: Path, tmp_path: Path) -> None:
    result = quantize(run, tmp_path / "q", scheme="nvfp4", exempt=["sublayers.1.*", "*.project"], probes=2)
    exact, low = residua.load(run), residua.load(tmp_path / "q")
    for name in ("sublayers.1.body.up", "sublayers.0.body.project"):
        assert torch.equal(exact.get_submodule(name).weight, low.get_submodule(name).weight)
        assert not any(m.name == name for m in result.modules)
    assert result.loss_without_exemptions != result.loss_after
    exempted = {t.name for t in result.kept if t.reason == "exempted"}
    assert exempted == {f"{name}.weight" for name in targets(exact)} - {f"{m.name}.weight" for m in result.modules}
    for probe in result.probes:
        assert math.isclose(probe.gain, result.loss_after - probe.loss)


def test_depth_operators_stay_exact_and_are_listed(run: Path, tmp_path: Path) -> None:
    result = quantize(run, tmp_path / "q", scheme="nvfp4", probes=0)
    listed = {t.name for t in result.kept if t.reason == "depth operator"}
    model = residua.load(run)
    assert listed and listed == {name for name, _ in model.named_parameters() if name.startswith("topology.")}
    page = quantization_page(result).html()
    assert all(name in page for name in listed)


def test_calibration_reads_the_stated_number_of_sequences(run: Path) -> None:
    text = CalibrationText.of_folder(run, residua.load(run).config, None)
    for sequences in (3, 16, 20):
        batches = list(text.calibration(sequences))
        assert sum(len(batch.tokens) for batch in batches) == sequences
        again = next(iter(text.calibration(sequences)))
        assert torch.equal(again.tokens, batches[0].tokens)


def test_impossible_requests_are_refused_in_one_sentence(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    wrong: list[tuple[dict[str, object], str]] = [
        ({"scheme": "int3"}, "scheme 'int3' does not exist: choose fp8"),
        ({"alpha": 1.5}, "α must lie between 0 and 1"),
        ({"exempt": ["layers.*"]}, "matches no module of this model; examples of names: "),
        ({"out": tmp_path / "full"}, "exists and is not an empty folder: choose another --out"),
        ({"model": tmp_path}, "holds no model: name a run"),
        ({"model": tmp_path / "nowhere"}, "nowhere is not a folder: name a run"),
        ({"data": tmp_path}, "is not a prepared dataset"),
        ({"inside": True}, "--inside extends SmoothQuant: use it with --smooth"),
        ({"engine": tmp_path / "full"}, "full exists and is not an empty folder: choose another --engine"),
        ({"engine": tmp_path / "q"}, "is the same as --out: name two folders"),
    ]
    for options, sentence in wrong:
        given = {"model": run, "out": tmp_path / "q", "scheme": "fp8", **options}
        with pytest.raises(ValueError, match=sentence):
            quantize(given.pop("model"), given.pop("out"), **given)
        assert not (tmp_path / "q").exists()
    assert (tmp_path / "full" / "x").read_text() == "mine"
    quantize(run, tmp_path / "q", probes=0)
    with pytest.raises(ValueError, match="is already quantized"):
        quantize(tmp_path / "q", tmp_path / "again")


def test_a_damaged_folder_is_refused_in_one_sentence(run: Path, tmp_path: Path) -> None:
    quantize(run, tmp_path / "q", probes=0)
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    for lost in ("sublayers.0.body.project.weight_scale", "embed.weight"):
        save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path)
        with pytest.raises(ValueError, match=f"lacks.*{lost}"):
            residua.load(tmp_path / "q")
    scale = "sublayers.0.body.project.weight_scale"
    for wrong, sentence in (
        (torch.ones(7, 7), r"weight_scale has shape \[7, 7\], expected \[1, 1\]\): .* quantize again"),
        (torch.ones(1, 1, dtype=torch.int32), r"weight_scale is torch\.int32, expected a floating-point type"),
    ):
        save_file(tensors | {scale: wrong}, path)
        with pytest.raises(ValueError, match=sentence):
            residua.load(tmp_path / "q")
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        residua.load(tmp_path / "q")
    for mark, sentence in (
        ({"version": 9}, "has version 9"),
        ({"version": 1, "scheme": "fp8"}, r"quantization\.json has no key modules: .* quantize again"),
        ({"version": 1, "scheme": 8, "modules": [], "model": {}}, r"quantization\.json: scheme is 8, expected a text"),
    ):
        (tmp_path / "q" / "quantization.json").write_text(json.dumps(mark))
        with pytest.raises(ValueError, match=sentence):
            residua.load(tmp_path / "q")


def test_advice_worth_under_a_thousandth_of_a_nat_is_omitted(run: Path, tmp_path: Path) -> None:
    result = quantize(run, tmp_path / "q", probes=1)
    for gain, given in ((9e-4, False), (2e-3, True)):
        probes = (result.probes[0].model_copy(update={"gain": gain}),)
        told = sentences(result.model_copy(update={"probes": probes}))
        assert any("--exempt" in sentence for sentence in told) is given


def test_non_finite_weights_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    model = residua.load(run)
    with torch.no_grad():
        model.sublayers[2].body.out.weight[1, 1] = math.nan
    with pytest.raises(ValueError, match=r"sublayers\.2\.body\.out holds 1 value\(s\) that are NaN"):
        quantize_model(model, SCHEMES["fp8"])


def test_the_command_prints_findings_and_the_next_step(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options = ("--scheme", "nvfp4", "--smooth", 0.5, "--calibration", 8, "--probes", 1, "--threads", 1)
    assert command(monkeypatch, "quantize", run, "--out", tmp_path / "q", *options) == 0
    shown = capsys.readouterr().out
    for part in ("perplexity", "Worst module", "depth operators", "Report:", "Next:"):
        assert part in shown
