"""Quantized weights on disk, in the compressed-tensors layout that serving engines read.

| scheme | tensors of a module | shape |
|---|---|---|
| fp8, fp8-group | `weight` E4M3, `weight_scale` fp32 | [R, C], [⌈R/128⌉, ⌈C/128⌉] |
| fp8-row | `weight` E4M3, `weight_scale` fp32 | [R, C], [R, 1] |
| nvfp4, nvfp4-static | `weight_packed` uint8, `weight_scale` E4M3 | [R, C/2], [R, C/16] |
| | `weight_global_scale`, `input_global_scale` fp32 | [1], [1] |

`quantization_config` goes into config.json and names the modules one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from residua.errors import UserError
from residua.quantize import fp8
from residua.quantize.fp8 import Fp8
from residua.quantize.nvfp4 import GROUP, Nvfp4, static_scale
from residua.quantize.schemes import Quantized

FORMATS = dict.fromkeys(("nvfp4", "nvfp4-static"), "nvfp4-pack-quantized")
TILES = {"fp8": fp8.BLOCK, "fp8-group": fp8.BLOCK, "fp8-row": fp8.ROW}
PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")


def module_tensors(name: str, weight: Quantized, input_peak: float) -> dict[str, Tensor]:
    """The tensors of one module. `input_global_scale` is the static second scale of NVFP4 activations."""
    if isinstance(weight, Fp8):
        return {f"{name}.weight": weight.codes, f"{name}.weight_scale": weight.scale}
    return {
        f"{name}.weight_packed": weight.packed(),
        f"{name}.weight_scale": weight.scale,
        f"{name}.weight_global_scale": weight.global_scale,
        f"{name}.input_global_scale": torch.tensor([static_scale(input_peak)]),
    }


def read_module(tensors: Mapping[str, Tensor], name: str, scheme: str, shape: Sequence[int]) -> Quantized:
    """The weight [R, C] of one module from its tensors; KeyError if one is missing, ValueError if it is another's."""
    rows, columns = shape
    if scheme in TILES:
        weight: Quantized = Fp8(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"], TILES[scheme])
    else:
        packed, scale, second = (tensors[f"{name}.{part}"] for part in PARTS[:3])
        weight = Nvfp4.unpacked(packed, scale, second, columns)
        columns += -columns % GROUP
    if tuple(weight.codes.shape) != (rows, columns):
        raise UserError(f"{name} has codes for {list(weight.codes.shape)}, expected {[rows, columns]}")
    _check_scale(name, weight)
    return weight


def read_input_scale(tensors: Mapping[str, Tensor], name: str) -> float:
    """The static scale of a module's input; KeyError if it is missing, ValueError if it is none."""
    scale = tensors[f"{name}.{PARTS[3]}"]
    if tuple(scale.shape) != (1,) or not scale.is_floating_point() or not 0 < float(scale) < math.inf:
        raise UserError(f"{name}.{PARTS[3]} is not one positive number")
    return float(scale)


def _check_scale(name: str, weight: Quantized) -> None:
    """Refuse scales of another shape, which would be cut or repeated, and scales that are not floating-point."""
    scales: dict[str, tuple[Tensor, tuple[int, ...]]] = {"weight_scale": (weight.scale, weight.scale_shape)}
    if isinstance(weight, Nvfp4):
        scales["weight_global_scale"] = (weight.global_scale, (1,))
    for part, (scale, expected) in scales.items():
        if tuple(scale.shape) != expected:
            raise UserError(f"{name}.{part} has shape {list(scale.shape)}, expected {list(expected)}")
        if not scale.is_floating_point():
            raise UserError(f"{name}.{part} is {scale.dtype}, expected a floating-point type")


def quantization_config(scheme: str, modules: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    form = FORMATS.get(scheme, "float-quantized")
    weights, activations = _arguments(scheme)
    group = {"targets": list(modules), "weights": weights, "input_activations": activations, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(scheme: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """How weights and activations are rounded, in the terms of compressed-tensors."""
    if scheme in FORMATS:
        four = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": GROUP}
        scales = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return four | scales | {"dynamic": False}, four | scales | {"dynamic": "local", "observer": "static_minmax"}
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    block = {"strategy": "block", "block_structure": [128, 128]}
    weights = eight | {"dynamic": False} | ({"strategy": "channel"} if scheme == "fp8-row" else block)
    grain = {"strategy": "group", "group_size": 128} if scheme == "fp8-group" else {"strategy": "token"}
    return weights, eight | {"dynamic": True} | grain
