"""Helpers that compile kernels ahead: they are told what is traced, and compile what would be launched."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from residua.ops import ahead, fused, launch
from residua.ops.depth_attention import junction

pytestmark = pytest.mark.skipif(not fused.INSTALLED, reason="Triton is not installed")

DEPTH = "residua.ops.depth_attention.junction"


def test_what_is_traced_is_heard_with_shapes_and_numbers() -> None:
    heard: list[tuple[Any, ...]] = []
    launch.listeners.append(lambda *call: heard.append(call))
    try:
        with FakeTensorMode():
            junction.depth_scores(torch.empty(2, 3, 8), torch.empty(5, 8), 1, 4, 1e-6)
    finally:
        launch.listeners.pop()
    (module, name, args, settings) = heard[0]
    assert (module, name, args[2:], settings) == (DEPTH, "depth_scores", (1, 4, 1e-6), {})
    assert ahead.StandIn.of(args[0]) == ((2, 3, 8), (24, 8, 1), torch.float32)


def test_equal_stand_ins_are_one_object() -> None:
    first, second = (ahead.StandIn.of(torch.empty(3, 4)) for _ in range(2))
    assert first is second and first.make().shape == (3, 4)


def test_a_device_without_kernels_has_no_helpers() -> None:
    assert ahead.Helpers.start(torch.device("cpu")) is None


HELPER = """
import torch
from residua.ops.ahead import Request, StandIn, serve

v, u = StandIn((64, 256), (256, 1), torch.bfloat16), StandIn((4, 256), (256, 1), torch.float32)
bad = Request("residua.ops.depth_attention.junction", "depth_scores", (v,), {})
good = bad._replace(args=(v, u, 0, 4, 1e-6))
print(serve(iter([bad, good]), 90, 132))
"""


@pytest.mark.slow
def test_a_helper_compiles_without_a_gpu_and_survives_what_it_cannot_call(tmp_path: Any) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    made = subprocess.run([sys.executable, "-c", HELPER], env=environment, capture_output=True, text=True, check=True)
    assert "scores_kernel" in made.stdout
    assert list(tmp_path.glob("*/scores_kernel.cubin"))
