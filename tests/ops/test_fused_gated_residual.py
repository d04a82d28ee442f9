"""The fused Gated Residual against the reference and a literal transcription, in float64."""

import pytest
import torch
from torch import Tensor

import residua
from residua import ops
from residua.config import choices
from residua.ops.gated_residual import launch, reference
from tests.golden.gated_residual import Read
from tests.golden.gated_residual import gated_residual as literal
from tests.ops.harness import assert_close, assert_equal, choose, interpreter, on_gpu, results

pytestmark = pytest.mark.slow
NAMES = (
    *("h", "streams'", "inj'", "g streams", "g inj", "g update"), *("g gain", "g down", "g up", "g inject")
)  # fmt: skip
triton = choose("triton", ops.gated_residual)


def drawn(tokens: int, n: int, width: int, rank: int, device: str = "cpu") -> list[Tensor]:
    """Gates and factors well away from ½ and 1, and streams of different size."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    sizes = 1 + torch.arange(tokens * n, device=device).view(tokens, n, 1) % 5
    maps = (2 * normal(rank, n * width) / width**0.5, normal(n * width, rank), 2 * normal(n, n * width) / width**0.5)
    return [normal(tokens, n, width) * sizes, normal(tokens, n), normal(tokens, width), normal(n, width), *maps]


def assert_exact(inputs: list[Tensor], tolerance: float = 3e-6) -> None:
    assert_close(results(triton, inputs), results(reference.gated_residual, inputs, torch.float64), tolerance, NAMES)


@interpreter
@pytest.mark.parametrize(
    "size", [(5, 4, 33, 4), (70, 4, 64, 16), (1, 2, 16, 1), (3, 3, 40, 20), (4, 9, 16, 2)], ids=str
)
def test_the_kernels_equal_the_reference_in_every_gradient(size):
    assert_exact(drawn(*size))


@interpreter
def test_several_row_tiles_per_program_are_correct(monkeypatch):
    tile = launch.TilePlan(16, 16, 4, 1, 1)
    monkeypatch.setattr(launch, "plans", lambda *_: (tile,) * 4)
    assert_exact(drawn(100, 2, 20, 3))


@interpreter
def test_a_last_read_without_factors_is_correct():
    *inputs, _ = drawn(20, 4, 24, 3)
    exact = results(reference.gated_residual, inputs, torch.float64)
    assert_close(results(triton, inputs), exact, 3e-6)
    assert len(exact) == 2 + len(inputs)


@interpreter
def test_repeated_streams_are_accepted():
    streams, injection, update, *weights = drawn(6, 3, 20, 4)

    def repeated(run):
        return lambda x, *rest: run(x.view(2, 3, 1, 20).expand(2, 3, 3, 20), *rest)

    inputs = [streams[:, 0], injection.view(2, 3, 3), update.view(2, 3, 20), *weights]
    exact = results(repeated(reference.gated_residual), inputs, torch.float64)
    assert_close(results(repeated(triton), inputs), exact, 3e-6, NAMES)


@interpreter
def test_results_do_not_depend_on_old_memory(monkeypatch):
    """Poisoned: every tensor that a launcher allocates is filled with NaN first. The same bits in every run."""
    inputs = drawn(50, 3, 33, 5)
    clean = results(triton, inputs)
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)
        monkeypatch.setattr(launch.torch, name, lambda *a, _plain=plain, **k: _plain(*a, **k).fill_(torch.nan))
    fresh = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: fresh(*a, **k).fill_(torch.nan))
    assert_equal(results(triton, inputs), clean)


@interpreter
def test_topology_with_kernels_equals_its_equation():
    """Two sublayers between the embedding and the head, as the topology calls the operator."""
    topology = residua.build_topology(choices.GatedResidual(streams=3, rank=5), 2, 24)
    reads = [*topology.reads, topology.last_read]
    leaves = [x for read in reads for x in (read.gain, read.down, read.up, read.inject) if x is not None]
    for leaf in leaves:
        torch.nn.init.normal_(leaf, std=0.5)
    x, *y = torch.randn(3, 24)

    def driven(x: Tensor, *y: Tensor) -> list[Tensor]:
        h, state = topology.open(x[None, None])
        inputs = [h]
        for k, output in enumerate(y):
            h, state = topology.step(k, output[None, None], state)
            inputs.append(h)
        return [h.flatten() for h in inputs]

    with ops.backend("triton"):
        ours = driven(x, *y)
        found = torch.autograd.grad(sum(h.square().sum() for h in ours), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    rest = iter(exact)
    doubled = [Read(*(None if w is None else next(rest) for w in (r.gain, r.down, r.up, r.inject))) for r in reads]
    expected = literal(x.double(), [output.double() for output in y], doubled)
    assert_close(ours, expected, 3e-6)
    assert_close(found, torch.autograd.grad(sum(h.square().sum() for h in expected), exact), 3e-6)


@interpreter
def test_a_rank_too_high_falls_back_to_the_reference():
    with ops.backend("triton"), pytest.raises(ValueError, match="has no fused kernel of gated_residual"):
        ops.gated_residual(*drawn(2, 2, 16, 129))


@on_gpu
@pytest.mark.parametrize("size", [(4, 512, 64), (4, 768, 96), (4, 1000, 16), (2, 1024, 128), (8, 256, 32)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_gpu_gradients_are_correct(dtype, tolerance, size):
    streams, injection, update, *weights = drawn(5000, *size, "cuda")
    weights[1], weights[2] = (w * (16 / size[2]) ** 0.5 for w in weights[1:3])  # scores that do not saturate
    inputs = [streams.to(dtype), injection, update.to(dtype), *weights]
    ours = results(triton, inputs)
    assert_close(ours, results(reference.gated_residual, inputs, torch.float64), tolerance, NAMES)
    assert_equal(ours, results(triton, inputs))
