"""Kernels of a forward pass compiled side by side: a dry run collects the calls, threads carry them out."""

import pytest
import torch

from residua.ops._runtime import library
from residua.ops._runtime.library import Call, compile_ahead, dry_run
from residua.ops.depth_attention.launch import depth_parts, parts


def test_dry_run_collects_calls_and_returns_correct_shapes() -> None:
    u = torch.randn(3, 5)
    with dry_run() as calls:
        empty = depth_parts(u)
    assert [call.name for call in calls] == ["depth_parts"]
    assert (empty.shape, empty.dtype) == ((3, 2, 5), torch.bfloat16)
    assert torch.equal(calls[0].run(*calls[0].args), parts(u))
    assert torch.equal(depth_parts(u), parts(u))
    assert len(calls) == 1


def test_each_operator_has_one_thread_for_all_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[Call]] = []
    monkeypatch.setattr(library, "_launch", made.append)
    first, second = torch.randn(3, 5), torch.randn(2, 4)
    compile_ahead(lambda: (depth_parts(first), depth_parts(second)))
    assert [[call.args[0].shape for call in calls] for calls in made] == [[(3, 5), (2, 4)]]


def test_launch_error_in_a_thread_fails_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(calls: list[Call]) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(library, "_launch", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        compile_ahead(lambda: depth_parts(torch.randn(3, 5)))
