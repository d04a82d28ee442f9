"""Low precision: exact simulations of FP8 and NVFP4, SmoothQuant, checkpoints and reports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residua.ops.low_precision.fp8 import Fp8 as Fp8
    from residua.ops.low_precision.nvfp4 import Nvfp4 as Nvfp4
    from residua.quantize.evaluate import static_scales as static_scales
    from residua.quantize.modules import quantize_model as quantize_model
    from residua.quantize.run import quantize as quantize
    from residua.quantize.schemes import SCHEMES as SCHEMES
    from residua.quantize.schemes import Scheme as Scheme
    from residua.quantize.schemes import quantize_fp8 as quantize_fp8
    from residua.quantize.schemes import quantize_nvfp4 as quantize_nvfp4
    from residua.quantize.smoothing import smooth as smooth
    from residua.quantize.store import load_quantized as load_quantized

# Names are imported on first use, so that a study file can be checked without importing torch.
_HOMES = {
    "SCHEMES": "schemes",
    "Fp8": "schemes",
    "Nvfp4": "schemes",
    "Scheme": "schemes",
    "load_quantized": "store",
    "quantize": "run",
    "quantize_fp8": "schemes",
    "quantize_model": "modules",
    "quantize_nvfp4": "schemes",
    "smooth": "smoothing",
    "static_scales": "evaluate",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'residua.quantize' has no attribute {name!r}")
    return getattr(import_module(f"residua.quantize.{_HOMES[name]}"), name)
