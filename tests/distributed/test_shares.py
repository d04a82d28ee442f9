"""How a model is divided into stages, and a head that several stages share."""

from functools import cache
from itertools import combinations, pairwise

import pytest
import torch

from residua import ops
from residua.config.run import RunConfig
from residua.data.loader import IGNORED
from residua.distributed.pipeline import stage
from residua.distributed.pipeline.shares import (
    DIVIDED_HEAD_COST,
    head_ranks,
    share_layers,
    share_work,
    shares_of,
    stage_work,
)
from residua.model.size import Work, measure, measure_work
from residua.ops.linear_cross_entropy import head_piece, launch

pytestmark = pytest.mark.slow  # torch.distributed takes a second to import


work_of = cache(lambda preset: measure_work(RunConfig.find(preset).model))


def slowest(preset: str, stages: int, *, split: str = "work") -> float:
    """Work of the most expensive stage over the mean."""
    config = RunConfig.find(preset).override([f"parallel.pipeline={stages}", f"parallel.split={split}"])
    costs = stage_work(work_of(preset), shares_of(config, work_of(preset)))
    return max(costs) / (sum(costs) / stages)


@pytest.mark.parametrize("stages", [4, 8, 16])
@pytest.mark.parametrize("preset", ["mgr-l-prenorm", "mgr-l-competitive4"])
def test_large_model_stages_stay_near_the_mean_work(preset: str, stages: int) -> None:
    assert slowest(preset, stages) <= 1.10
    assert slowest(preset, stages, split="layers") >= 1.2


@pytest.mark.parametrize(("preset", "stages"), [("mgr-l-full", 16), ("mgr-l-block8", 16), ("mgr-l-prenorm", 32)])
def test_stages_of_large_sublayers_are_as_even_as_possible(preset: str, stages) -> None:
    assert slowest(preset, stages) <= 1.34
    assert slowest(preset, stages, split="layers") >= 1.9


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [4, 8, 16])
def test_measured_stages_take_at_most_10_percent_over_the_mean(stages: int) -> None:
    """In CPU seconds, which depend little on other load; still, one of three attempts is enough."""
    from tests.distributed.stage_times import timed

    ratios: list[float] = []
    while len(ratios) < 3 and min(ratios, default=2.0) > 1.10:
        ratios.append(timed([stages])[stages])
    assert min(ratios) <= 1.10, ratios


def test_a_head_is_divided_only_if_that_balances_stages() -> None:
    config = RunConfig.find("mgr-l-prenorm")
    few, many = (shares_of(config, work_of("mgr-l-prenorm"), stages=stages) for stages in (4, 16))
    assert [share.pieces for share in few] == [1] * 4 and head_ranks(few, 4) == [3]
    assert [share.pieces for share in many] == [16] * 16 and head_ranks(many, 16) == [14, 15]


@pytest.mark.parametrize("anchors", ["none", "lime", "depth_attention"])
def test_work_of_an_additive_model_is_its_flops(anchors: str) -> None:
    model = RunConfig.find("mgr-s-prenorm").override([f"model.anchors.kind={anchors}"]).model
    assert measure_work(model).total == pytest.approx(measure(model).flops_per_token, rel=1e-6)


def test_every_sublayer_and_head_row_belongs_to_one_stage() -> None:
    work = Work(0.5, tuple(1.0 + k % 3 for k in range(11)), 20.0)
    for stages in (2, 3, 5, 8):
        shares = share_work(work, stages, 7)
        assert [k for share in shares for k in share.sublayers] == list(range(11))
        rows = [share.rows(100) for share in shares if share.head]
        assert rows[0][0] == 0 and rows[-1][1] == 100
        assert all(before[1] == after[0] for before, after in pairwise(rows))
        extra = 0.0 if shares[0].pieces == 1 else (DIVIDED_HEAD_COST - 1) * work.head
        assert sum(stage_work(work, shares)) == pytest.approx(work.total + extra)


def test_no_other_division_has_a_cheaper_slowest_stage() -> None:
    """Compared with all divisions of a small case."""
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    shares = share_work(Work(0.0, tuple(costs), 3.0), 3, 1)
    found = max(stage_work(Work(0.0, tuple(costs), 3.0), shares))
    whole = [*costs, 3.0]
    assert found == min(
        max(sum(whole[:a]), sum(whole[a:b]), sum(whole[b:])) for a, b in combinations(range(1, len(whole)), 2)
    )


def test_stages_can_be_equal_numbers_of_whole_layers() -> None:
    shares = share_layers(7, 3)
    assert [len(share.sublayers) for share in shares] == [6, 4, 4]
    assert [k for share in shares for k in share.sublayers] == list(range(14))
    assert [len(share.head) for share in shares] == [0, 0, 1]


@pytest.mark.parametrize("bounds", [(0, 7, 23), (0, 1, 2, 22, 23)])
@pytest.mark.parametrize("path", ["reference", "kept", "fused"])
def test_head_pieces_give_the_losses_and_gradients_of_the_whole(bounds, path, monkeypatch) -> None:
    """In float64; the fused path keeps the softmax, or recomputes it three tokens at a time."""
    monkeypatch.setattr(launch, "PIECE_BYTES", 2**30 if path == "kept" else 0)
    monkeypatch.setattr(launch, "CHUNK_BYTES", 3 * 8 * 16)
    monkeypatch.setattr(launch, "TILE", 1)
    monkeypatch.setattr(stage, "head_piece", head_piece.reference if path == "reference" else head_piece.fused)
    hidden = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(23, (2, 5))
    targets[0, 1] = IGNORED
    softcap = 2.0 if path == "reference" else None  # kernels refuse one
    expected = ops.linear_cross_entropy(hidden, weight, targets, z_loss=0.1, softcap=softcap)
    wanted = torch.autograd.grad(expected[0] + 3 * expected[1], (hidden, weight))

    lse, picked = torch.full(targets.shape, -torch.inf, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.float64)
    for start, stop in pairwise(bounds):
        more, found = stage.piece_of_head(hidden, weight[start:stop], targets, start, softcap)
        lse, picked = torch.logaddexp(lse, more), picked + found
    got = stage.losses_of(lse, picked, targets, z_loss=0.1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(got[0] + 3 * got[1], (hidden, weight))
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kept", [0, 2**30])
def test_a_head_piece_on_float32_kernels_is_close_to_float64(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets inside and outside of the rows, gradients of one output or both, and tokens without any."""
    monkeypatch.setattr(launch, "PIECE_BYTES", kept)
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    targets, grads = torch.tensor([0, 39, 5, -1, 40, 7]), (torch.randn(6), torch.randn(6))
    grads[0][1] = grads[1][2] = grads[0][5] = grads[1][5] = 0
    fused = head_piece.fused
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = head_piece.reference(*exact, targets)
    with ops.backend("triton"):
        got = fused(hidden, weight, targets)
    torch.testing.assert_close([t.double() for t in got], list(expected), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected, exact, [g.double() for g in grads])
    with ops.backend("triton"):
        gradients = torch.autograd.grad(got, (hidden, weight), grads)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)
