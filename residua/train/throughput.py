"""Speed relative to the hardware: model FLOP utilisation, peak FLOP/s by GPU, peak memory."""

from __future__ import annotations

import resource
import sys

import torch

# Dense bf16 peaks in TFLOP/s, from the vendors' datasheets. The first entry that the device's name contains is used.
PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None for a CPU or a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for known, peak in PEAKS.items() if known in name), None)


def mfu(tokens_per_second: float, flops_per_token: float, device: torch.device) -> float | None:
    """Model FLOP utilisation: FLOP/s of the model as a share of the device's peak."""
    peak = peak_flops(device)
    return None if peak is None else tokens_per_second * flops_per_token / peak


def reset_peak_memory(device: torch.device) -> None:
    """Measure peak memory from here on (GPU only): a process may train more than one model."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: what PyTorch allocated on the GPU, or the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if sys.platform == "darwin" else 2**20)
