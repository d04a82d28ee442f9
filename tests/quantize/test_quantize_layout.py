"""Our folders read by compressed-tensors itself: the same weights, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import residua
from residua.model.decoder import Decoder
from residua.quantize import quantize
from residua.quantize.modules import install, quantize_weights, rounded, targets
from residua.quantize.schemes import SCHEMES, find_scheme
from residua.quantize.store import load_quantized, save_quantized
from tests.model.small import small, tokens_and_targets

pytestmark = pytest.mark.slow


def dequantized_by_compressed_tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    name = "compressed_tensors.entrypoints.convert"
    library = pytest.importorskip(name, reason="compressed-tensors is not installed")
    reader = library.CompressedTensorsDequantizer(folder, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if not name.endswith(".input_global_scale")}
    return reader.validate(tensors)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "nvfp4-static"])  # whose weights are nvfp4's
def test_compressed_tensors_reads_the_same_weights(scheme: str, run: Path, tmp_path: Path) -> None:
    quantize(run, tmp_path / "q", scheme=scheme, probes=0)
    dtype = torch.bfloat16 if scheme == "nvfp4" else torch.float32  # that library unpacks FP4 into bf16
    theirs = dequantized_by_compressed_tensors(tmp_path / "q", dtype)
    ours = dict(residua.load(tmp_path / "q").named_parameters())
    assert theirs.keys() == ours.keys()
    low = set(targets(residua.load(run)))
    for name, tensor in theirs.items():
        expected = ours[name].detach()
        assert torch.equal(tensor, expected.to(dtype) if name.rpartition(".")[0] in low else expected), name


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_experts_are_stored_separately_and_load_back(scheme: str, activation: str, tmp_path: Path) -> None:
    moe = {"kind": "moe", "hidden": 16, "experts": 3, "top_k": 2, "activation": activation}
    model = residua.build(small(ffn=moe, attention={"kind": "softmax", "heads": 2}))
    names, weights = _quantized(model, scheme, tmp_path / "q")
    assert "sublayers.1.body.experts.up.2" in weights and "sublayers.1.body.experts.out.0" in weights
    tokens = tokens_and_targets()[0]
    install(model, rounded({name: model.get_submodule(name) for name in names}, weights, find_scheme(scheme)))
    assert torch.equal(load_quantized(tmp_path / "q")(tokens), model(tokens))
    theirs = dequantized_by_compressed_tensors(tmp_path / "q", torch.bfloat16)
    for name, weight in weights.items():
        assert torch.equal(theirs[f"{name}.weight"], weight.dequantize().bfloat16())


def test_widths_not_divisible_by_a_block_load_back(tmp_path: Path) -> None:
    model = residua.build(small(width=20, ffn={"kind": "swiglu", "hidden": 27}))
    for scheme in SCHEMES:
        out = tmp_path / scheme
        names, weights = _quantized(model, scheme, out)
        loaded = load_quantized(out)
        for name in names:
            assert torch.equal(loaded.get_submodule(name).weight, weights[name].dequantize())


def test_compressed_tensors_accepts_the_config(run: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    from residua.quantize.store import quantization_config

    for scheme in SCHEMES:
        config = library.QuantizationConfig.model_validate(quantization_config(scheme, ["a.b"]))
        (group,) = config.config_groups.values()
        preset = {"fp8-group": "FP8_BLOCK", "fp8-row": "FP8_DYNAMIC", "nvfp4": "NVFP4"}.get(scheme)
        if preset is not None:
            named = library.preset_name_to_scheme(preset, ["a.b"])
            for side in ("weights", "input_activations"):
                ours, theirs = getattr(group, side), getattr(named, side)
                for key in ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic", "symmetric"):
                    assert getattr(ours, key) == getattr(theirs, key), (scheme, side, key)


def _quantized(model: Decoder, scheme: str, out: Path) -> tuple[list[str], dict]:
    names = list(targets(model))
    weights = quantize_weights(targets(model), find_scheme(scheme))
    peaks = dict.fromkeys(names, 1.0)
    save_quantized(out, out.parent, model, names, weights, scheme, peaks, {})
    return names, weights
