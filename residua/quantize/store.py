"""Write and read the folder of a quantized model.

It holds `config.toml`, `tokenizer.json` and `source/` as in a run, and `model.safetensors` in the compressed-tensors
layout. The quantization_config of `config.json` lists each module. `quantization.json` says how the folder was made;
`residua.load` looks for it. Serving engines read the compressed-tensors layout:

| scheme | tensors of a module | shape |
|---|---|---|
| fp8, fp8-group | `weight` E4M3, `weight_scale` fp32 | [R, C], [⌈R/128⌉, ⌈C/128⌉] |
| fp8-row | `weight` E4M3, `weight_scale` fp32 | [R, C], [R, 1] |
| nvfp4, nvfp4-static | `weight_packed` uint8, `weight_scale` E4M3 | [R, C/2], [R, C/16] |
| | `weight_global_scale`, `input_global_scale` fp32 | [1], [1] |
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.config.model import ModelConfig
from residua.config.settings import of_file
from residua.data.tokenizer import SOURCE
from residua.errors import UserError
from residua.files import atomic_folder, refuse_used
from residua.model.decoder import Decoder
from residua.model.size import build_if_it_fits
from residua.ops.low_precision import fp8
from residua.ops.low_precision.fp8 import Fp8
from residua.ops.low_precision.nvfp4 import GROUP, Nvfp4, static_scale
from residua.quantize.fp8_gemm import with_fp8_products
from residua.quantize.modules import candidates, inputs, install, is_rounded, matrices, rounded
from residua.quantize.schemes import Quantized, find_scheme
from residua.reading import Shape, check, inside, read_json, reason, refuse, shown
from residua.storage.checkpoint import model_tensors
from residua.storage.hugging_face import COMPANIONS
from residua.storage.tensors import WEIGHTS, fitting, read_tensors, require_finite, save_tensors

MARK = "quantization.json"
AGAIN = "the folder is damaged, so quantize again"
COPIED = ("config.toml", "tokenizer.json", "tokenizer_config.json")
VERSION = 1


def save_quantized(
    out: Path,
    source: Path,
    model: Decoder,
    modules: Collection[str],
    weights: Mapping[str, Quantized],
    scheme: str,
    input_peaks: Mapping[str, float],
    about: Mapping[str, Any],
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write the folder: the matrices of `modules` from `weights`, everything else unchanged from `model`.

    `input_peaks` holds the largest inputs by module, or by the stack that a matrix belongs to; `texts` adds files.
    """
    refuse_used(out)
    tensors = {n: tensor for n, tensor in model_tensors(model).items() if not is_rounded(n, modules)}
    for name, weight in weights.items():
        peak = next(input_peaks[n] for n in (name, *_parents(name)) if n in input_peaks)
        tensors |= module_tensors(name, weight, peak)
    mark = {"version": VERSION, "scheme": scheme, "modules": list(modules), **about}
    mark["model"] = model.config.model_dump(mode="json", exclude_none=True)
    config = {"model_type": "residua", "quantization_config": quantization_config(scheme, weights)}
    documents = {MARK: as_json(mark), "config.json": as_json(config), **(texts or {})}
    write_folder(out, tensors, documents, copies=files_to_copy(source))


def as_json(content: Mapping[str, Any]) -> str:
    """Format the text of a JSON file."""
    return json.dumps(content, indent=1) + "\n"


def write_folder(
    out: Path, tensors: Mapping[str, Tensor], documents: Mapping[str, str], copies: Mapping[str, Path]
) -> None:
    """Atomically write a folder with model.safetensors, `documents`, and copies of the files that exist."""
    refuse_used(out)
    with atomic_folder(out) as folder:
        save_tensors(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        for name, path in copies.items():
            if path.exists():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, folder / name)
        for name, text in documents.items():
            (folder / name).write_text(text, encoding="utf-8")


def files_to_copy(source: Path) -> dict[str, Path]:
    """The files to copy from a model folder into its quantized folder, by name; refuse links out of the folder."""
    return {name: inside(source, name) for name in (*COPIED, *(f"{SOURCE}/{name}" for name in COMPANIONS))}


def is_quantized(folder: Path) -> bool:
    """Return whether `residua quantize` wrote the folder."""
    return (folder / MARK).exists()


def load_quantized(
    folder: str | Path, *, fp8_products: torch.device | None = None, allow_nonfinite: bool = False
) -> Decoder:
    """Load the model of a quantized folder on the CPU, with weights and activations rounded by its scheme.

    With `fp8_products`, the model is on that device and multiplies in FP8 where the device and shapes allow it; a
    warning names the other modules. Weights that are NaN or infinite are refused, unless `allow_nonfinite`.
    """
    folder = Path(folder)
    mark = _read_mark(folder)
    with of_file(folder / MARK):
        scheme, model = find_scheme(mark.scheme), build_if_it_fits(ModelConfig(**mark.model), folder)
    tensors = read_tensors(inside(folder, WEIGHTS), AGAIN)
    if not allow_nonfinite:
        require_finite(tensors, folder / WEIGHTS, AGAIN)
    there = candidates(model)
    try:
        modules = {name: there[name] for name in mark.modules}
        weights = {
            f"{name}{end}": read_module(tensors, f"{name}{end}", scheme.name, matrix.shape)
            for name, module in modules.items()
            for end, matrix in matrices(module).items()
        }
        replaced = rounded(modules, weights, scheme, _scales(tensors, modules) if scheme.static else None)
    except KeyError as error:
        refuse(f"{folder / WEIGHTS} lacks {error}", AGAIN)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        refuse(f"{folder / WEIGHTS} does not fit {MARK} ({reason(error)})", AGAIN)
    _copy_rest(folder / WEIGHTS, model, tensors, modules)
    install(model, replaced)
    if fp8_products is not None:
        _multiply_in_fp8(model.to(fp8_products), modules, weights, scheme.name, fp8_products)
    return model


def _scales(tensors: Mapping[str, Tensor], modules: Mapping[str, torch.nn.Module]) -> dict[str, float]:
    """The static scales by activation; all matrices of a stack of experts hold the same scale."""
    scales = {}
    for name, module in modules.items():
        ends = list(matrices(module))
        firsts = (ends[0], ends[len(ends) // 2])
        for activation, end in zip(inputs(name, module), firsts, strict=False):
            scales[activation] = read_input_scale(tensors, f"{name}{end}")
    return scales


def _multiply_in_fp8(
    model: Decoder, modules: Collection[str], weights: Mapping[str, Quantized], scheme: str, device: torch.device
) -> None:
    plain = {
        name: weight
        for name, weight in weights.items()
        if name in modules and isinstance(weight, Fp8) and getattr(model.get_submodule(name), "bias", None) is None
    }
    real, problems = with_fp8_products(plain, scheme, device)
    install(model, real)
    slow = [name for name in modules if name not in real]
    if slow:
        why = problems.get(slow[0], "FP8 products support only projections without bias in an FP8 scheme")
        warnings.warn(
            f"{len(slow)} of {len(modules)} modules only simulate FP8 products, among them {slow[0]}: {why}.",
            stacklevel=3,
        )


@torch.no_grad()
def _copy_rest(path: Path, model: Decoder, tensors: Mapping[str, Tensor], modules: Collection[str]) -> None:
    """Load the high-precision tensors; each must exist with the right shape."""
    for name, tensor in model_tensors(model).items():
        if is_rounded(name, modules):
            continue
        tensor.copy_(fitting(path, name, tensors.get(name), tensor, AGAIN))


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


class _Mark(Shape):
    scheme: str
    modules: list[str]
    model: dict[str, Any]


def _read_mark(folder: Path) -> _Mark:
    path = inside(folder, MARK)
    content = read_json(path, dict[str, Any], AGAIN)
    if content.get("version") != VERSION:
        version = shown(content.get("version"))
        raise UserError(f"{path} has version {version}, this Residua reads {VERSION}: quantize again.")
    return check(content, _Mark, path, AGAIN)


FORMATS = dict.fromkeys(("nvfp4", "nvfp4-static"), "nvfp4-pack-quantized")
TILES = {"fp8": fp8.BLOCK, "fp8-group": fp8.BLOCK, "fp8-row": fp8.ROW}
PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")


def module_tensors(name: str, weight: Quantized, input_peak: float) -> dict[str, Tensor]:
    """The tensors of one module. `input_global_scale` is the static second-level scale of NVFP4 activations."""
    if isinstance(weight, Fp8):
        return {f"{name}.weight": weight.codes, f"{name}.weight_scale": weight.scale}
    return {
        f"{name}.weight_packed": weight.packed(),
        f"{name}.weight_scale": weight.scale,
        f"{name}.weight_global_scale": weight.global_scale,
        f"{name}.input_global_scale": torch.tensor([static_scale(input_peak)]),
    }


def read_module(tensors: Mapping[str, Tensor], name: str, scheme: str, shape: Sequence[int]) -> Quantized:
    """Read the weight [R, C] of one module; KeyError if a tensor is missing, ValueError if one does not fit."""
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
    """Read the static scale of a module's input; KeyError if it is missing, ValueError if it is not a valid scale."""
    scale = tensors[f"{name}.{PARTS[3]}"]
    if tuple(scale.shape) != (1,) or not scale.is_floating_point() or not 0 < float(scale) < math.inf:
        raise UserError(f"{name}.{PARTS[3]} is not one positive number")
    return float(scale)


def _check_scale(name: str, weight: Quantized) -> None:
    """Refuse scales of the wrong shape, which would be cut or repeated, and scales that are not floating-point."""
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
