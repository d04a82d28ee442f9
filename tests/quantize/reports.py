"""Quantizations made from formulas: no model is trained or run."""

from typing import Any

from residua.quantize.result import ModuleError, Outlier, Probe, QuantizationResult, UnquantizedTensor

PARTS = (("body.project", (1536, 512)), ("body.out", (512, 512)), ("body.up", (3072, 512)), ("body.out", (512, 1536)))


def module(
    name: str, *, error: float = 0.149, activations: float = 0.1056, weights: float = 0.1052, ratio: float = 4.1,
    shape: tuple[int, int] = (512, 512),
) -> ModuleError:  # fmt: skip
    outliers = tuple(
        Outlier(channel=c, peak=ratio * p, ratio=ratio * p, share=0.1 * p) for c, p in ((304, 1.0), (7, 0.5))
    )
    return ModuleError(
        name=name, shape=shape, error=error, weight_error=weights, activation_error=activations, input_peak=9.0,
        inner_peak=None, outliers=outliers,
    )  # fmt: skip


def report(
    layers: int = 12, *, cost: float = 0.004, outlier_layer: int | None = None, **changes: Any
) -> QuantizationResult:
    """A quantized model. The first projection of `outlier_layer` has one channel far above the others."""
    modules = []
    for layer in range(layers):
        for index, (part, shape) in enumerate(PARTS):
            name = f"sublayers.{2 * layer + index // 2}.{part}"
            if layer == outlier_layer and index == 0:
                modules.append(module(name, error=0.41, activations=0.39, weights=0.105, ratio=310.0, shape=shape))
            else:
                error = 0.14 + 0.001 * ((layer + 3 * index) % 7)
                modules.append(module(name, error=error, activations=0.7 * error, weights=0.69 * error, shape=shape))
    gains = zip(sorted(modules, key=lambda m: -m.error), (0.6 * cost, 0.001 * cost, -0.001 * cost), strict=False)
    table, query = (8192, 512), (512,)
    facts: dict[str, Any] = {
        "model": "runs/tiny", "scheme": "nvfp4", "bits": "W4A4", "words": "4-bit floating point in blocks of 16",
        "alpha": None, "inside": False, "calibration_sequences": 0, "exempt": (), "text": "data/wiki",
        "validation_tokens": 65536, "device": "cpu", "loss_before": 3.2, "loss_folded": None, "loss_after": 3.2 + cost,
        "loss_without_exemptions": None, "modules": tuple(modules),
        "probes": tuple(Probe(module=m.name, loss=3.2 + cost - gain, gain=gain) for m, gain in gains),
        "kept": (
            UnquantizedTensor(name="embed.weight", shape=table, parameters=8192 * 512, reason="embedding or head"),
            UnquantizedTensor(name="topology.reads.0.query", shape=query, parameters=512, reason="depth operator"),
        ),
        "unsmoothed": (), "bytes_before": 4 * 3_000_000 * layers, "bytes_after": 700_000 * layers,
    }  # fmt: skip
    return QuantizationResult(**(facts | changes))
