"""Attention Residuals with the deferred backward against the plain topology in float64: outputs and every gradient."""

import math

import pytest
import torch
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils.checkpoint import checkpoint

from residua import ops
from residua.config import choices
from residua.model import taps
from residua.model.topology import build_topology
from residua.ops._runtime.library import launchers
from residua.ops.depth_attention import launch, source_gradients
from residua.ops.depth_attention.plan import BLOCK as BLOCK_SIZE
from residua.ops.depth_attention.plan import GROUP, MAX_FUSED_READERS, ReadPlan, cheapest
from tests.nightly import only_nightly
from tests.ops.harness import assert_close, assert_equal, relative
from tests.ops.test_declarations import Shapes

from .test_fused_depth_attention import as_near

pytestmark = pytest.mark.slow


FULL = choices.FullAttnRes(scale=0.7)
WINDOW = choices.FullAttnRes(window=2)
BLOCK = choices.BlockAttnRes(sublayers_per_block=3)


def topology_of(config, sublayers, width):
    torch.manual_seed(width)
    topology = build_topology(config, sublayers, width)
    for parameter in topology.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=4 / width**0.5)
    return topology


def outputs_of(sublayers, width, shape=(2, 5)):
    return [torch.randn(*shape, width) for _ in range(sublayers + 1)]


def walk(topology, x, outputs):
    """Every read's h when the sublayers' outputs do not depend on their inputs."""
    h, state = topology.open(x)
    reads = []
    for k, y in enumerate(outputs):
        h, state = topology.step(k, y, state)
        reads.append(h)
    return reads


def run(choice, topology, outputs, upstream, walk=walk, frozen=()):
    leaves = [y.detach().clone().requires_grad_(i not in frozen) for i, y in enumerate(outputs)]
    with ops.backend(choice):
        reads = walk(topology, leaves[0], leaves[1:])
    wanted = [t for t in (*leaves, *topology.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(reads, wanted, upstream[-len(reads) :], allow_unused=True)
    return [*(h.detach() for h in reads), *grads]


def case_of(config, sublayers, width, shape=(2, 5), device="cpu", dtype=torch.float32):
    topology = topology_of(config, sublayers, width).to(device)
    outputs, upstream = outputs_of(sublayers, width, shape), outputs_of(sublayers - 1, width, shape)
    return topology, [y.to(device, dtype) for y in outputs], [g.to(device, dtype) for g in upstream]


def truth_of(topology, outputs, upstream, **options):
    return run("reference", topology.double(), [y.double() for y in outputs], [g.double() for g in upstream], **options)


# a row of 33 is one piece, a row of 100 is two
WALKED = {
    "full, one sublayer": (FULL, 1, 33),
    "full, one sublayer, two pieces": (FULL, 1, 100),
    "full": (FULL, 5, 33),
    "full, two pieces": (FULL, 5, 100),
    "full, groups": (FULL, 17, 33),
    "full, groups, two pieces": (FULL, 17, 100),
    "full, window": (WINDOW, 5, 33),
    "full, window, two pieces": (WINDOW, 5, 100),
    "full, blocks of sources that end between tokens": (FULL, 12, 16, (19,)),
    "full, 73 sources: groups and blocks of every size, readers in three chunks": (FULL, 72, 8, (3,)),
    "block": (BLOCK, 7, 33),
    "block, two pieces": (BLOCK, 7, 100),
    "block, groups": (BLOCK, 13, 24, (2, 16)),
    "block of one": (choices.BlockAttnRes(sublayers_per_block=1), 3, 33),
    "block of one, two pieces": (choices.BlockAttnRes(sublayers_per_block=1), 3, 100),
}
BY_NIGHT = ("full, groups, two pieces", "full, window", "block of one, two pieces", "full, 73 sources")


@pytest.mark.parametrize("walked", only_nightly(WALKED, but=[w for w in WALKED if w.split(":")[0] not in BY_NIGHT]))
def test_reads_and_gradients_equal_the_plain_topology(walked):
    case = case_of(*WALKED[walked])
    assert_close(run("triton", *case), truth_of(*case), 2e-5)


def test_warps_that_share_a_row_get_the_same_sums(monkeypatch):
    tile = launch.piece_tile
    monkeypatch.setattr(launch, "piece_tile", lambda *a, **b: {**tile(*a, **b), "TOKENS": 2, "TOGETHER": True})
    case = case_of(FULL, 5, 24, shape=(3,))
    assert_close(run("triton", *case), truth_of(*case), 2e-5)


def test_adjacent_sources_share_the_backward_of_common_readers():
    plan = topology_of(FULL, 16, 8).plan
    assert plan.leads == {4: [3, 2, 1, 0], 8: [7, 6, 5], 11: [10, 9]}
    assert [len(readers) for readers in plan.own_readers] == [3, 3, 2, 1, 13, 3, 2, 1, 9, 2, 1, 6, 5, 4, 3, 2, 1]
    for leader, led in plan.leads.items():
        assert all(plan.readers[s] == plan.own_readers[s] + plan.readers[leader] for s in led)


def test_groups_of_reads_and_blocks_of_sources_grow_with_depth():
    plan = topology_of(FULL, 72, 8).plan
    sizes, blocks = [size for _, size in plan.group], [1 + len(led) for led in plan.leads.values()]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == GROUP
    assert blocks == sorted(blocks, reverse=True) and blocks[0] == BLOCK_SIZE
    assert max(len(readers) for s, readers in enumerate(plan.own_readers) if s in plan.leader) == MAX_FUSED_READERS
    assert any(size > 1 for _, size in topology_of(BLOCK, 13, 24).plan.group) and topology_of(FULL, 12, 16).plan.leads


def test_chosen_ranges_have_the_lowest_total_cost():
    def cost(start, size):
        return None if (start, size) == (2, 2) else (start * 7 + size * 5) % 11 + 2 * size

    def every(start):
        yield from (
            [[]]
            if start == 7
            else ([(start, e), *rest] for e in range(start + 1, min(7, start + 3) + 1) for rest in every(e))
        )

    def price(ranges):
        return sum(math.inf if (p := cost(s, e - s)) is None else p for s, e in ranges)

    chosen = cheapest(7, 3, cost)
    assert [chosen[0][0], *(e for _, e in chosen)] == [*(s for s, _ in chosen), 7]
    assert price(chosen) == min(map(price, every(0)))


def test_growing_and_windowed_sources_are_not_grouped():
    for config in (WINDOW, BLOCK):
        plan = topology_of(config, 8, 8).plan
        assert not plan.leads and plan.own_readers == plan.readers


@pytest.mark.nightly
def test_a_source_with_many_readers_is_differentiated_correctly():
    plan = ReadPlan([[0, k + 1] for k in range(40)], [False] * 41)

    class Fan(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.u = torch.nn.Parameter(torch.randn(40, 8))

        def open(self, x):
            return x, source_gradients.open(plan, x, self.u)

        def step(self, k, y, state):
            return source_gradients.step(plan, k, y, state)

    def plainly(topology, x, outputs):
        return [ops.depth_attention([x, y], topology.u[k]) for k, y in enumerate(outputs)]

    case = Fan(), outputs_of(40, 8, (3,)), outputs_of(39, 8, (3,))
    assert_close(run("triton", *case), truth_of(*case, walk=plainly), 2e-5)


def test_a_read_of_many_sources_is_differentiated_correctly():
    values, scores = torch.randn(73, 5, 8), torch.randn(73, 2, 16)
    h, lse = launch.depth_mix([*values], [*scores], [i % 2 for i in range(73)])
    z = torch.stack([scores[i, i % 2, :5] for i in range(73)]).double()
    assert relative(h, (z.softmax(0)[..., None] * values.double()).sum(0)) < 1e-6
    assert relative(lse[:5], z.logsumexp(0)) < 1e-6


def chained(topology, x, outputs):
    """The last h when every sublayer's output depends on its input."""
    h, state = topology.open(x)
    for k, y in enumerate(outputs):
        h, state = topology.step(k, torch.tanh(h * y), state)
    return [h]


def test_chained_sublayers_get_the_same_gradients():
    for config, sublayers in ((FULL, 8), (BLOCK, 5)):
        case = case_of(config, sublayers, 24)
        assert_close(run("triton", *case, walk=chained), truth_of(*case, walk=chained), 2e-5)


@pytest.mark.parametrize("config", [FULL, BLOCK], ids=["full", "block"])
def test_a_loss_that_skips_some_reads_has_correct_gradients(config):
    def early(topology, x, outputs):
        reads = walk(topology, x, outputs)
        return [reads[1], reads[2]]

    case = case_of(config, 4, 24)
    for ours, truth in zip(run("triton", *case, walk=early), truth_of(*case, walk=early), strict=True):
        assert relative(ours, truth) < 2e-5 if truth is not None else ours is None or not ours.any()


def test_frozen_inputs_do_not_change_other_gradients():
    case = case_of(BLOCK, 4, 24)
    case[0].reads[1].query.requires_grad_(False)
    assert_close(run("triton", *case, frozen=(0, 3)), truth_of(*case, frozen=(0, 3)), 2e-5)


def test_empty_input_gives_empty_reads_and_zero_gradients():
    results = run("triton", *case_of(BLOCK, 4, 16, shape=(0, 5)))
    assert all(h.shape == (0, 5, 16) for h in results[:4])
    assert all(not g.any() for g in results[4:])


def test_any_memory_layout_of_outputs_and_gradients_works():
    topology, outputs, upstream = case_of(FULL, 3, 24, shape=(4, 4))
    truth = truth_of(topology, outputs, upstream)
    outputs = [y.transpose(0, 1).contiguous().transpose(0, 1) for y in outputs]
    upstream = [torch.stack([g, g], -1)[..., 0] for g in upstream]
    assert_close(run("triton", topology.float(), outputs, upstream), truth, 2e-5)


def test_bfloat16_is_close_even_with_truncating_stores():
    case = case_of(BLOCK, 4, 40, dtype=torch.bfloat16)
    assert_close(run("triton", *case), truth_of(*case), 6e-2)


@pytest.mark.parametrize("config", only_nightly([FULL, BLOCK], but=[BLOCK]), ids=["full", "block"])
def test_checkpointing_each_step_is_bit_identical(config):
    def checkpointed(topology, x, outputs):
        h, state = topology.open(x)
        for k, y in enumerate(outputs):

            def junction(h, y, *state, k=k):
                return topology.step(k, torch.tanh(h * y), state)

            h, state = checkpoint(junction, h, y, *state, use_reentrant=False)
        return [h]

    case = case_of(config, 6, 24)
    assert_equal(run("triton", *case, walk=checkpointed), run("triton", *case, walk=chained))


@pytest.mark.parametrize("config", only_nightly([FULL, BLOCK], but=[BLOCK]), ids=["full", "block"])
def test_compiled_walk_matches_eager(config):
    torch._dynamo.reset()
    case = case_of(config, 5, 24)
    compiled = torch.compile(walk, backend="aot_eager", fullgraph=True)
    assert_close(run("triton", *case, walk=compiled), run("triton", *case), 1e-5)


def test_handles_leave_no_operations_in_a_compiled_graph():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def collect(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(walk, backend=aot_autograd(fw_compiler=collect), fullgraph=True)
    run("triton", *case_of(FULL, 3, 24), walk=compiled)
    assert sum("depth_mix" in name for name in seen) == 3
    assert not any("empty" in name for name in seen)


def test_weights_are_recorded_and_sum_to_one():
    topology, outputs, _ = case_of(BLOCK, 4, 24)
    with ops.backend("triton"), taps.record() as seen:
        walk(topology, outputs[0].requires_grad_(), outputs[1:])
    with ops.backend("reference"), taps.record() as plain:
        walk(topology, outputs[0], outputs[1:])
    assert list(seen) == list(plain)
    for name, weights in plain.items():
        torch.testing.assert_close(seen[name], weights, atol=1e-6, rtol=1e-5)


def test_state_without_gradients_is_the_list_of_sources():
    topology, outputs, _ = case_of(FULL, 2, 16)
    with ops.backend("triton"), torch.no_grad():
        _, state = topology.open(outputs[0])
        _, state = topology.step(0, outputs[1], state)
    assert len(state) == 2


def test_queries_split_in_two_keep_sixteen_bits():
    u = torch.randn(3, 24)
    parts = launch.depth_parts(u)
    assert parts.shape == (3, 2, 24) and parts.dtype == torch.bfloat16
    assert (parts.double().sum(1) - u).abs().le(2.0**-17 * u.abs()).all()


def test_kernels_return_and_change_what_tracing_knows():
    with SchemaCheckMode(), Shapes() as shapes:
        launch.depth_parts(torch.randn(3, 24))
        for config in (FULL, BLOCK):
            run("triton", *case_of(config, 12, 24))
    declared = {"depth_attend", "depth_attend_backward"}  # `test_declarations` calls them
    assert {name for name in launchers if name.startswith("depth_")} == shapes.called | declared


WALKS = pytest.mark.parametrize(
    "config, sublayers", [(FULL, 9), (FULL, 40), (BLOCK, 8), (BLOCK, 20)], ids=["full", "deep", "block", "deep block"]
)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 1000, 1280, 2048])
@WALKS
def test_gpu_walk_equals_the_plain_topology_in_float64(config, sublayers, width):
    case = case_of(config, sublayers, width, shape=(3, 101), device="cuda")
    assert_close(run("triton", *case), truth_of(*case), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 1000, 1280, 2048])
@WALKS
def test_gpu_bfloat16_walk_is_as_accurate_as_pytorch(config, sublayers, width):
    case = case_of(config, sublayers, width, shape=(3, 101), device="cuda", dtype=torch.bfloat16)
    ours, plain = run("triton", *case), run("reference", *case)
    as_near(ours, plain, truth_of(*case), values=2 * sublayers + 1, noise=1.2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [FULL, BLOCK], ids=["full", "block"])
def test_gpu_runs_are_fused_by_default_and_bit_identical(config):
    case = case_of(config, 6, 768, shape=(4, 128), device="cuda", dtype=torch.bfloat16)
    with ops.backend("auto"):
        assert len(case[0].open(case[1][0])[1]) > 1
    assert_equal(run("auto", *case), run("auto", *case))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("readers", [40, 72])
def test_gpu_runs_with_many_readers_are_bit_identical(readers, dtype):
    case = case_of(FULL, readers, 768, shape=(8, 128), device="cuda", dtype=dtype)
    assert_equal(run("triton", *case), run("triton", *case))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [FULL, BLOCK], ids=["full", "block"])
def test_compiled_gpu_walk_matches_eager(config):
    torch._dynamo.reset()
    case = case_of(config, 4, 768, shape=(4, 64), device="cuda", dtype=torch.bfloat16)
    assert_close(run("auto", *case, walk=torch.compile(walk, fullgraph=True)), run("auto", *case), 5e-3)
