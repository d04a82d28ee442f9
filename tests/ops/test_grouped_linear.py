"""One linear map per group of rows, and the sorting of tokens by expert around it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.expert_slots import combine, dispatch, sort_slots
from residua.ops.grouped_linear import grouped_product, reference, takes
from tests.golden.compare import agree, random
from tests.ops.harness import assert_close, results

SIZES = [[3, 0, 4, 1], [0, 0, 8, 0], [1, 1, 1, 1]]


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def by_row(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    group = torch.searchsorted(ends, torch.arange(len(x)), right=True)
    return torch.einsum("nk,nok->no", x, weight[group])


@pytest.mark.parametrize("form", [reference.grouped_linear, reference._in_blocks], ids=["loop", "blocks"])
@pytest.mark.parametrize("sizes", [*SIZES, [9, 1, 0, 2]])
def test_reference_multiplies_rows_by_their_groups_matrix(sizes: list[int], form: Callable[..., Tensor]) -> None:
    x, weight, ends = random(sum(sizes), 6), random(4, 5, 6, seed=1), ends_of(sizes)
    agree([form(x, weight, ends)], [by_row(x, weight, ends)], {"x": x, "weight": weight})


@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_product_equals_the_reference(sizes: list[int]) -> None:
    """PyTorch runs the same product on a CPU, by its own loop."""
    x, weight, ends = random(sum(sizes), 16).float(), random(4, 24, 16, seed=1).float(), ends_of(sizes)
    found, expected = (results(partial(f, ends=ends), (x, weight)) for f in (grouped_product, reference.grouped_linear))
    torch.testing.assert_close(found, expected)


def test_empty_input_gives_empty_output() -> None:
    for form in (reference.grouped_linear, reference._in_blocks):
        assert form(torch.zeros(0, 6), torch.zeros(4, 5, 6), ends_of([0] * 4)).shape == (0, 5)


def test_the_grouped_product_needs_half_precision_whole_rows() -> None:
    x, weight = torch.zeros(4, 16), torch.zeros(2, 24, 16)
    assert not takes(x, weight)
    assert takes(x.bfloat16(), weight)
    assert not takes(x.bfloat16(), weight[:, :20])
    with torch.autocast("cpu", torch.bfloat16):
        assert takes(x, weight)
        assert grouped_product(x, weight, ends_of([1, 3])).dtype == torch.bfloat16


def test_slots_are_sorted_by_expert_and_restored() -> None:
    chosen = torch.tensor([[2, 0], [3, 2], [0, 2]])
    slots = sort_slots(chosen, experts=5)
    assert slots.ends.tolist() == [2, 2, 5, 6, 6]
    assert (slots.order // 2).tolist() == [0, 2, 0, 1, 2, 1]  # within an expert, tokens keep their order
    assert slots.order[slots.place].tolist() == list(range(6))


def test_dispatch_and_combine_are_gathers_with_their_gradients() -> None:
    chosen = torch.tensor([[2, 0], [3, 2], [0, 2]])
    slots = sort_slots(chosen, experts=4)
    x, weights, scale = random(3, 4), random(3, 2, seed=1), random(4, 4, seed=2)
    experts = chosen.flatten()[slots.order]
    found = combine(dispatch(x, slots) * scale[experts], weights, slots)
    expected = torch.stack([sum(weights[n, j] * x[n] * scale[chosen[n, j]] for j in range(2)) for n in range(3)])
    agree([found], [expected], {"x": x, "weights": weights, "scale": scale})


@pytest.mark.slow
def test_another_division_of_the_rows_is_not_recompiled() -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()

    def around(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return reference.grouped_linear(2 * x, weight, ends) + 1

    compiled = torch.compile(around, backend=counter, fullgraph=True)
    x, weight = torch.randn(8, 6), torch.randn(4, 5, 6)
    for sizes in ([3, 0, 4, 1], [0, 0, 8, 0], [2, 2, 2, 2]):
        ends = ends_of(sizes)
        torch.testing.assert_close(compiled(x, weight, ends), by_row(2 * x, weight, ends) + 1)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [100, 1, 0, 27], [7, 0, 0, 0]])
def test_gpu_grouped_products_handle_odd_and_empty_groups(sizes: list[int]) -> None:
    ends = ends_of(sizes).cuda()
    leaves = [torch.randn(*s, device="cuda").bfloat16() for s in ((sum(sizes), 64), (4, 48, 64))]
    found, expected = (results(partial(f, ends=ends), leaves) for f in (ops.grouped_linear, reference.grouped_linear))
    assert_close(found, expected, 0.01)
