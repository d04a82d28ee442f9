"""NVFP4 with activation scales from calibration: where they come from, how they round, where they are stored."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import residua
from residua.data.loader import Batch
from residua.ops.low_precision.nvfp4 import round_nvfp4_static, static_scale
from residua.quantize import quantize_model, static_scales
from residua.quantize.engine import save_engine
from residua.quantize.evaluate import largest_inputs
from residua.quantize.modules import quantize_weights, targets
from residua.quantize.schemes import find_scheme
from residua.quantize.store import load_quantized, save_quantized
from tests.model.small import VOCABULARY, small, tokens_and_targets

pytestmark = pytest.mark.slow

STATIC = find_scheme("nvfp4-static")
MOE = {"kind": "moe", "hidden": 16, "experts": 3, "top_k": 2, "activation": "swiglu"}


def test_static_scales_keep_small_blocks_and_clip_large_ones() -> None:
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 20] = 0.011, 100.0
    low = round_nvfp4_static(x, static_scale(10.0))
    assert low[0, 3] == pytest.approx(0.011, rel=0.1) and low[1, 20] == pytest.approx(10.0)
    assert torch.equal(round_nvfp4_static(x[:, :0], 1.0), x[:, :0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_activation_is_not_clipped(value: float) -> None:
    x = torch.randn(3, 32)
    x[1, 3] = value
    low = round_nvfp4_static(x, static_scale(3.0))
    assert low[1, 3].isnan() and low[[0, 2]].isfinite().all()


def batches(count: int) -> list[Batch]:
    tokens = torch.randint(VOCABULARY, (count, 2, 7), generator=torch.Generator().manual_seed(6))
    return [Batch(rows[:, :-1], rows[:, 1:], None) for rows in tokens]


def test_scales_cover_the_largest_calibration_inputs() -> None:
    model = residua.build(small(ffn=MOE)).eval()
    modules, seen = targets(model), dict[str, list[torch.Tensor]]()
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, arguments, name=name: seen.setdefault(name, []).append(arguments[0]))
    experts = model.sublayers[1].body.experts

    def inner(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        x, ends = arguments
        for e, rows in enumerate(x.tensor_split(ends.tolist()[:-1])):
            gate, value = (rows @ experts.up.chunk(3)[e].T).chunk(2, -1)
            seen.setdefault("sublayers.1.body.experts.out", []).append(nn.functional.silu(gate) * value)

    experts.register_forward_pre_hook(inner)
    with torch.no_grad():
        for batch in batches(3):
            model(batch.tokens)
    expected = {name: max(float(v.abs().max()) for v in values if len(v)) for name, values in seen.items()}
    found = largest_inputs(model, modules, batches(3))
    for name, peak in expected.items():
        assert found[name] == pytest.approx(peak, rel=1e-6)
    assert {*found} - {*expected} == {"sublayers.3.body.experts.out", "sublayers.5.body.experts.out"}
    assert static_scales(model, STATIC, batches(3)) == {name: static_scale(peak) for name, peak in found.items()}
    assert static_scales(model, find_scheme("nvfp4"), batches(3)) == {}


def test_a_static_scheme_without_scales_is_refused() -> None:
    model = residua.build(small())
    with pytest.raises(ValueError, match="nvfp4-static rounds inputs with calibrated scales: measure them with"):
        quantize_model(model, STATIC)
    quantize_model(model, STATIC, scales=static_scales(model, STATIC, batches(1)))
    assert "nvfp4-static" in repr(model.sublayers[0].body.project)


def test_a_study_calibrates_each_model_on_its_own_text() -> None:
    from residua.study.measurements import quantized_copy

    model = residua.build(small()).eval()
    text: Any = SimpleNamespace(calibration=batches)
    copy = quantized_copy(model, "nvfp4-static", text, 2)
    quantize_model(model, STATIC, scales=static_scales(model, STATIC, batches(2)))
    tokens = tokens_and_targets()[0]
    assert torch.equal(copy(tokens), model(tokens))


def test_expert_scales_load_back_for_each_input(tmp_path: Path) -> None:
    model = residua.build(small(ffn=MOE)).eval()
    modules = targets(model)
    weights, peaks = quantize_weights(modules, STATIC), largest_inputs(model, modules, batches(2))
    save_quantized(tmp_path / "q", tmp_path, model, list(modules), weights, STATIC.name, peaks, {})
    quantize_model(model, STATIC, scales={name: static_scale(peak) for name, peak in peaks.items()})
    tokens = tokens_and_targets()[0]
    loaded = load_quantized(tmp_path / "q")
    assert torch.equal(loaded(tokens), model(tokens))
    scales = {name: t for name, t in load_file(tmp_path / "q" / "model.safetensors").items() if "input_global" in name}
    experts = "sublayers.1.body.experts"
    assert scales[f"{experts}.up.0.input_global_scale"] != scales[f"{experts}.out.0.input_global_scale"]
    assert float(scales[f"{experts}.out.2.input_global_scale"]) == static_scale(peaks[f"{experts}.out"])


@pytest.mark.parametrize("damage", [None, [0.0], [float("inf")], [1.0, 1.0]], ids=str)
def test_a_folder_without_a_valid_scale_is_refused(damage: list[float] | None, tmp_path: Path) -> None:
    model = residua.build(small())
    modules = targets(model)
    weights, peaks = quantize_weights(modules, STATIC), dict.fromkeys(modules, 1.0)
    save_quantized(tmp_path / "q", tmp_path, model, list(modules), weights, STATIC.name, peaks, {})
    path, name = tmp_path / "q" / "model.safetensors", f"{next(iter(modules))}.input_global_scale"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors | ({} if damage is None else {name: torch.tensor(damage)}), path)
    with pytest.raises(ValueError, match=r"model.safetensors .*input_global_scale.*quantize again"):
        load_quantized(tmp_path / "q", allow_nonfinite=True)


@pytest.mark.parametrize("place", ["source", "."], ids=["imported run", "Hugging Face folder"])
def test_the_chat_template_and_end_tokens_are_copied(place: str, tmp_path: Path) -> None:
    source = tmp_path / "run"
    (source / place).mkdir(parents=True)
    files = {"chat_template.jinja": "{{ messages }}", "tokenizer_config.json": "{}", "generation_config.json": "{ }"}
    for name, text in files.items():
        (source / place / name).write_text(text)
    keys = {"eos_token_id": [7, 9], "bos_token_id": 3, "vocab_size": 1}
    (source / place / "config.json").write_text(json.dumps(keys))
    model = residua.build(small())
    modules = targets(model)
    weights = quantize_weights(modules, STATIC)
    save_engine(tmp_path / "q", source, model, weights, STATIC.name, dict.fromkeys(modules, 1.0))
    for name, text in files.items():
        assert (tmp_path / "q" / name).read_text() == text
    written = json.loads((tmp_path / "q" / "config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"], written["vocab_size"]) == ([7, 9], 3, VOCABULARY)


def test_a_trained_run_ends_texts_with_its_tokenizers_token(tmp_path: Path) -> None:
    from residua.data.tokenizer import Tokenizer
    from residua.quantize.engine import end_tokens

    assert end_tokens(tmp_path) == {}
    tokenizer = Tokenizer.bytes()
    tokenizer.save(tmp_path / "tokenizer.json")
    assert end_tokens(tmp_path) == {"eos_token_id": tokenizer.end_of_text}


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4-static"])
def test_engine_output_states_whose_loss_was_measured(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from residua.quantize import run as work
    from tests.quantize.reports import report
    from tests.trained import residua

    monkeypatch.setattr(work, "quantize", lambda *_, scheme, **__: report(scheme=scheme))
    arguments = ("--scheme", scheme, "--out", tmp_path / "q", "--engine", tmp_path / "served")
    assert residua(monkeypatch, "quantize", "run", *arguments) == 0
    printed = capsys.readouterr().out
    assert f"For serving engines: {tmp_path / 'served'}" in printed
    assert ("--scheme nvfp4-static measures the loss that they will have" in printed) == (scheme == "nvfp4")
