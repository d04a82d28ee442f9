"""Write and read the folder of a quantized model.

`config.toml`, `tokenizer.json` and `source/` as in a run, `model.safetensors` in the compressed-tensors layout,
`config.json` with its quantization_config, and `quantization.json`, which says how it was made and is what
`residua.load` looks for.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
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
from residua.quantize.apply import candidates, install, is_rounded, rounded
from residua.quantize.fp8 import Fp8
from residua.quantize.layout import module_tensors, quantization_config, read_input_scale, read_module
from residua.quantize.low import inputs, matrices
from residua.quantize.real import with_fp8_products
from residua.quantize.schemes import Quantized, find_scheme
from residua.reading import Shape, check, inside, read_json, reason, refuse, shown
from residua.storage.checkpoint import model_tensors
from residua.storage.hugging_face import COMPANIONS
from residua.storage.tensors import WEIGHTS, fitting, read_tensors, require_finite, save_tensors

MARK = "quantization.json"
AGAIN = "the folder is damaged, quantize again"
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
    """Write the folder: the matrices of `modules` from `weights`, everything else from `model` as it is.

    `input_peaks` are the largest inputs by module, or by the stack that a matrix belongs to; `texts` are more files.
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
    """The text of a JSON file."""
    return json.dumps(content, indent=1) + "\n"


def write_folder(
    out: Path, tensors: Mapping[str, Tensor], documents: Mapping[str, str], copies: Mapping[str, Path]
) -> None:
    """A folder with model.safetensors, copies of the files that exist and texts, whole or not at all."""
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
    """The files of a model folder that its quantized folder gets too, by name; refuses links to elsewhere."""
    return {name: inside(source, name) for name in (*COPIED, *(f"{SOURCE}/{name}" for name in COMPANIONS))}


def is_quantized(folder: Path) -> bool:
    """Whether a folder was made by `residua quantize`."""
    return (folder / MARK).exists()


def load_quantized(
    folder: str | Path, *, fp8_products: torch.device | None = None, allow_nonfinite: bool = False
) -> Decoder:
    """The model of a quantized folder, on the CPU, with weights and activations rounded by its scheme.

    With `fp8_products`, the model is on that device and multiplies in FP8 where the device and the shapes allow it; a
    warning names the modules where they do not. Weights that are NaN or infinite are refused, unless `allow_nonfinite`.
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
    """The static scales by activation; the matrices of a stack of experts all hold the same."""
    found = {}
    for name, module in modules.items():
        ends = list(matrices(module))
        firsts = (ends[0], ends[len(ends) // 2])
        for activation, end in zip(inputs(name, module), firsts, strict=False):
            found[activation] = read_input_scale(tensors, f"{name}{end}")
    return found


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
        why = problems.get(slow[0], "only projections in an FP8 scheme and without bias have an FP8 product")
        warnings.warn(
            f"{len(slow)} of {len(modules)} modules only simulate FP8 products, among them {slow[0]}: {why}.",
            stacklevel=3,
        )


@torch.no_grad()
def _copy_rest(path: Path, model: Decoder, tensors: Mapping[str, Tensor], modules: Collection[str]) -> None:
    """Load the tensors in high precision; each must be there in the right shape."""
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
