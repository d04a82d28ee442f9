"""The chunked head against the reference in float64: losses, every gradient, any incoming gradients."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from residua import ops
from residua.ops._runtime.library import launchers
from residua.ops.linear_cross_entropy import launch, token_likelihoods
from residua.ops.linear_cross_entropy.fp8 import fp8_cross_entropy
from residua.ops.linear_cross_entropy.reference import linear_cross_entropy as reference
from residua.ops.low_precision.fp8 import Scales
from tests.ops.harness import assert_close, assert_one_graph, choose, gradients, interpreter, on_gpu
from tests.ops.test_declarations import Shapes

pytestmark = pytest.mark.slow

TOKENS, WIDTH, VOCABULARY = 11, 12, 37
Z = 0.05
GRADIENTS = {"loss + z": (0.7, 0.7), "loss only": (1.3, 0.0), "z only": (0.0, 2.0), "both apart": (0.4, -1.1)}


def inputs(dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype | None = None, device: str = "cpu", **sizes):
    tokens, width, vocabulary = (sizes.get(k, d) for k, d in (("n", TOKENS), ("c", WIDTH), ("v", VOCABULARY)))
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.randn(vocabulary, width, device=device).to(dtype).to(weight_dtype or dtype)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    targets[::4] = -100
    return hidden, weight, targets


def results(
    operator: Callable, hidden: Tensor, weight: Tensor, targets: Tensor, g: tuple, z_loss: float = Z
) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    loss, z = operator(*leaves, targets, z_loss=z_loss)
    return [loss, z, *torch.autograd.grad(g[0] * loss + g[1] * z, leaves)]


def trained(operator: Callable, hidden: Tensor, weight: Tensor, targets: Tensor, g: float) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    loss, z = operator(*leaves, targets, z_loss=Z)
    return [loss, z, *torch.autograd.grad(g * (loss + z), leaves)]


both = pytest.mark.parametrize("operator", [launch.linear_cross_entropy, launch.training_cross_entropy])
fused_operator, fused_training = (choose("triton", f) for f in (ops.linear_cross_entropy, ops.training_cross_entropy))


@pytest.fixture(params=["whole", "in chunks"])
def chunks(request, monkeypatch):
    if request.param == "in chunks":
        monkeypatch.setattr(launch, "TRAINED_BYTES", 4 * VOCABULARY * 3)
        monkeypatch.setattr(launch, "CHUNK_BYTES", 4 * VOCABULARY * 3)
        monkeypatch.setattr(launch, "TILE", 1)


@interpreter
def test_training_kernel_equals_the_reference(chunks):
    hidden, weight, targets = inputs()
    exact = results(reference, hidden.double(), weight.double(), targets, (0.7, 0.7))
    assert_close(trained(fused_training, hidden, weight, targets, 0.7), exact, 2e-6)


def test_training_with_zero_coefficient_still_learns_target():
    """1 + 2·z_loss·lse = 0: only the target's entry is left."""
    weight = torch.tensor([[-5.0], [-5.0]], dtype=torch.float64)
    hidden = torch.full((1, 1), (torch.tensor(2.0).double().log() + 1 / (2 * Z)).item() / 5, dtype=torch.float64)
    drawn = (hidden, weight, torch.tensor([1]))
    ours = trained(launch.training_cross_entropy, *drawn, 1.0)
    assert_close(ours, results(reference, *drawn, (1.0, 1.0)), 1e-12)


def test_training_compiles_with_float32_master_gradients():
    hidden, weight, targets = inputs()

    def step(h: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return sum(launch.training_cross_entropy(h * 2, w, targets, z_loss=Z))

    assert_one_graph(step, (hidden, weight))
    assert {g.dtype for g in gradients(step, (hidden, weight))} == {torch.float32}


@pytest.mark.parametrize("tokens, most, expected", [(24, 8, 3), (25, 8, 4), (0, 8, 1), (5, 0, 5), (1000, 600, 2)])
def test_chunks_are_equal_multiples_of_a_tile(tokens, most, expected):
    chunks = launch._chunks(tokens, torch.empty(2, 1), 8 * most)
    sizes = [len(range(tokens)[rows]) for rows in chunks]
    assert len(chunks) == expected and sum(sizes) == tokens and max(sizes) <= max(most, 1)
    assert most < launch.TILE or all(rows.start % launch.TILE == 0 for rows in chunks)


@pytest.fixture
def refused(monkeypatch):
    """The forward pass has computed the gradients: nothing may be computed again."""

    def backward(*args: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(launch, "backward", backward)


@both
def test_gradients_of_a_sum_are_computed_in_the_forward_pass(operator, chunks, refused):
    drawn = [t.double() if t.is_floating_point() else t for t in inputs()]
    assert_close(trained(operator, *drawn, 0.7), results(reference, *drawn, (0.7, 0.7)), 1e-12)


@pytest.mark.parametrize("g", GRADIENTS.values(), ids=GRADIENTS)
def test_forward_computes_gradients_if_there_is_no_z_term(chunks, refused, g):
    drawn = [t.double() if t.is_floating_point() else t for t in inputs()]
    ours, exact = (results(operator, *drawn, g, 0.0) for operator in (launch.linear_cross_entropy, reference))
    assert_close(ours, exact, 1e-12)


@pytest.mark.parametrize("g", GRADIENTS.values(), ids=GRADIENTS)
def test_plain_chunks_equal_reference_for_any_output_gradient(chunks, g):
    drawn = [t.double() if t.is_floating_point() else t for t in inputs()]
    assert_close(results(launch.linear_cross_entropy, *drawn, g), results(reference, *drawn, g), 1e-12)


@interpreter
@pytest.mark.parametrize("g", GRADIENTS.values(), ids=GRADIENTS)
def test_kernel_equals_reference_for_any_output_gradient(chunks, g):
    hidden, weight, targets = inputs()
    exact = results(reference, hidden.double(), weight.double(), targets, g)
    assert_close(results(fused_operator, hidden, weight, targets, g), exact, 2e-6)


@interpreter
@pytest.mark.parametrize("vocabulary", [1, 33, 100])
def test_the_kernel_splits_rows_of_any_length(vocabulary, monkeypatch):
    monkeypatch.setattr(launch, "LANES", 8)
    logits, targets = 30 * torch.randn(5, vocabulary), torch.randint(vocabulary, (5,))
    expected = logits.double().softmax(-1)
    lse, nll = launch.softmax_(logits, targets, -100, True)
    assert torch.allclose(logits.double(), expected, atol=1e-6)
    assert torch.allclose(nll.double(), -expected.gather(1, targets[:, None])[:, 0].log(), atol=1e-4)
    assert torch.isfinite(lse).all()


@interpreter
@pytest.mark.parametrize("vocabulary", [33, 100])
def test_interpreted_codes_of_probabilities_are_exact(vocabulary, monkeypatch):
    monkeypatch.setattr(launch, "LANES", 8)
    logits, targets = 8 * torch.randn(5, vocabulary), torch.randint(vocabulary, (5,))
    targets[0] = -100
    codes = [torch.empty(5, vocabulary, dtype=torch.float8_e5m2) for _ in range(2)]
    p = logits.clone()
    launch.softmax_(p, targets, -100, True, codes[0])
    p_others = p.clone().scatter_(1, targets.clamp(min=0)[:, None], 0)
    p_others[0] = p[0]  # of an ignored token, whose gradient is 0
    assert torch.equal(codes[0].float(), (p_others * 2**15).to(torch.float8_e5m2).float())
    launch.plain_softmax_(logits, targets, -100, True, codes[1])
    neighbours = (codes[0][1:].view(torch.uint8).int() - codes[1][1:].view(torch.uint8).int()).abs()
    assert neighbours.max() <= 1 and neighbours.float().mean() < 0.01


def test_coefficient_cancelling_to_zero_still_learns_target():
    hidden, weight = torch.zeros(1, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    lse = torch.tensor(2.0, dtype=torch.float64).log()
    g = (1.0, float(-1 / (2 * Z * lse)))
    drawn = (hidden, weight, torch.tensor([1]))
    assert_close(results(launch.linear_cross_entropy, *drawn, g), results(reference, *drawn, g), 1e-12)


@pytest.mark.parametrize(
    "run",
    [
        partial(trained, launch.linear_cross_entropy, g=1.0),
        partial(trained, launch.training_cross_entropy, g=1.0),
        partial(results, launch.linear_cross_entropy, g=(1.0, 1.0)),  # apart, so that backward computes them again
    ],
    ids=["sum", "training", "apart"],
)
def test_ignored_or_no_tokens_give_zero_loss(run, chunks):
    hidden, weight, targets = inputs()
    ignored, absent = run(hidden, weight, torch.full_like(targets, -100)), run(hidden[:0], weight, targets[:0])
    assert all(t.count_nonzero() == 0 for t in [*ignored, *absent])
    assert absent[2].shape == (0, WIDTH)


def test_non_contiguous_batches_are_accepted(chunks):
    hidden, weight, targets = inputs()
    leaf = hidden.t().contiguous().requires_grad_()
    batch = leaf.t()[:10].reshape(5, 2, WIDTH).transpose(0, 1)
    loss, z = launch.linear_cross_entropy(batch, weight, targets[:10].reshape(5, 2).t(), z_loss=Z)
    (g,) = torch.autograd.grad(loss + z, leaf)
    exact = results(reference, hidden[:10].double(), weight.double(), targets[:10], (1.0, 1.0))
    assert_close([loss, z, g.t()[:10]], exact[:3], 2e-6)


def test_a_second_backward_pass_accepts_other_gradients(chunks):
    drawn = inputs()
    leaves = [t.clone().requires_grad_() for t in drawn[:2]]
    loss, z = launch.linear_cross_entropy(*leaves, drawn[2], z_loss=Z)
    for g in GRADIENTS.values():
        again = torch.autograd.grad(g[0] * loss + g[1] * z, leaves, retain_graph=True)
        assert_close([loss, z, *again], results(reference, *(t.double() for t in drawn[:2]), drawn[2], g), 2e-6)


def test_autocast_gives_master_weights_float32_gradients():
    hidden, weight, targets = inputs()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = launch.linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == torch.float32 and weight.grad is not None and weight.grad.dtype == torch.float32


def test_compiles_into_one_graph(refused):
    hidden, weight, targets = inputs()
    assert_one_graph(lambda h, w: sum(launch.linear_cross_entropy(h * 2, w, targets, z_loss=Z)), (hidden, weight))


@both
def test_no_gradients_are_computed_if_none_are_required(operator, chunks):
    hidden, weight, targets = inputs()
    wanted = operator(hidden.clone().requires_grad_(), weight, targets, z_loss=Z)
    with Shapes() as shapes:
        plain = operator(hidden, weight, targets, z_loss=Z)
        with torch.no_grad():
            same = operator(hidden.requires_grad_(), weight, targets, z_loss=Z)
    assert shapes.called == {"linear_cross_entropy_value"}
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(plain, wanted, strict=True))


@both
def test_a_second_derivative_is_refused(operator):
    hidden, weight, targets = inputs()
    hidden.requires_grad_()
    loss, z = operator(hidden, weight, targets, z_loss=Z)
    (g,) = torch.autograd.grad(loss + z, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative: call it inside"):
        (loss + z + g.square().sum()).backward()


def test_no_input_is_kept_without_a_z_term():
    """So the matrix may change between the passes, as the reference allows under autocast."""
    hidden, weight, targets = inputs()
    hidden.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = launch.linear_cross_entropy(hidden, weight, targets)
    weight.zero_()
    assert torch.autograd.grad(loss, hidden)[0].count_nonzero() > 0


FUSED = pytest.param(fused_operator, marks=interpreter, id="fused")


def fp8_head(*args: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    return fp8_cross_entropy(*args, Scales(*torch.ones(4).unbind()), z_loss=z_loss)


OPERATORS = [launch.linear_cross_entropy, launch.training_cross_entropy, FUSED, fp8_head]


FINISHES = {
    "a sum": trained,
    "apart": lambda *args: results(*args[:-1], (1.0, 0.5)),
    "no gradients": lambda operator, *args: operator(*args[:-1], z_loss=Z),
}


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor, by dtype; also of tensors made inside the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = launchers.get(func._schema.name.removeprefix("residua::"))
        if inside is not None:
            with self:
                return inside(*args, **kwargs or {})
        made = func(*args, **kwargs or {})
        for t in tree_leaves(made):
            if isinstance(t, Tensor):
                self.elements[t.dtype] = max(self.elements[t.dtype], t.numel())
        return made


@pytest.mark.parametrize(
    ("vocabulary", "width", "mebibytes"), [(50304, 768, 768), (262144, 768, 576), (262144, 2048, 256)]
)
def test_logits_and_cast_matrix_share_one_gib(vocabulary, width, mebibytes):
    cast = torch.empty(vocabulary, width, dtype=torch.bfloat16, device="meta")
    assert launch.room(cast.nbytes) == mebibytes * 2**20


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("finish", FINISHES.values(), ids=FINISHES)
@pytest.mark.parametrize("bound", ["TRAINED_BYTES", "BESIDE_BYTES"])
def test_logits_of_only_a_chunk_of_tokens_exist_at_a_time(operator, finish, bound, monkeypatch):
    for name in (bound, "LEAST_BYTES", "CHUNK_BYTES"):
        monkeypatch.setattr(launch, name, 2 * VOCABULARY * 4)
    monkeypatch.setattr(launch, "TILE", 1)
    hidden, weight, targets = inputs(torch.bfloat16, torch.float32, n=24, c=4)
    with Largest() as seen:
        finish(operator, hidden, weight, targets, 1.0)
    assert seen.elements[torch.bfloat16] <= 4 * VOCABULARY and seen.elements[torch.float32] <= 4 * VOCABULARY


@on_gpu
@pytest.mark.parametrize("width", [768, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("g", GRADIENTS.values(), ids=GRADIENTS)
def test_gpu_gradients_are_correct(dtype, g, width, chunks):
    hidden, weight, targets = inputs(dtype, torch.float32, "cuda", n=300, c=width, v=50304)
    weight = weight / width**0.5
    exact = results(reference, hidden.double(), weight.to(dtype).double(), targets, g)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    assert_close(results(fused_operator, hidden, weight, targets, g), exact, tolerance)


@on_gpu
@pytest.mark.parametrize("width", [768, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_training_gradients_are_correct(dtype, width, monkeypatch):
    monkeypatch.setattr(launch, "TRAINED_BYTES", 2 * 50304 * 100)
    monkeypatch.setattr(launch, "TILE", 1)
    hidden, weight, targets = inputs(dtype, torch.float32, "cuda", n=300, c=width, v=50304)
    weight = weight / width**0.5
    exact = results(reference, hidden.double(), weight.to(dtype).double(), targets, (0.7, 0.7))
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    assert_close(trained(fused_training, hidden, weight, targets, 0.7), exact, tolerance)


@on_gpu
@pytest.mark.parametrize("operator", [fused_training, fused_operator])
@pytest.mark.parametrize("z_loss", [0.0, Z])
@pytest.mark.parametrize("vocabulary", [50304, 262144])
def test_gpu_training_needs_under_one_gib_of_scratch(operator, z_loss, vocabulary):
    hidden, weight, targets = inputs(torch.bfloat16, torch.float32, "cuda", n=16384, c=768, v=vocabulary)
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, z = operator(*leaves, targets, z_loss=z_loss)
    gradients = torch.autograd.grad(loss + z, leaves)
    beyond = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)
    assert beyond <= 2**30, beyond


@on_gpu
@pytest.mark.parametrize("vocabulary", [16, 1024])
def test_gpu_targets_are_read_before_being_overwritten(vocabulary):
    """Warps run independently: one may overwrite what another has not read yet."""
    logits, targets = 30 * torch.randn(8192, vocabulary, device="cuda"), torch.randint(vocabulary, (8192,)).cuda()
    _, expected = launch.softmax_(logits.clone(), targets, -100, False)
    wrong = sum((launch.softmax_(logits.clone(), targets, -100, True)[1] != expected).sum() for _ in range(200))
    assert int(wrong) == 0


@interpreter
def test_token_likelihoods_equal_those_from_logits() -> None:
    hidden, weight, targets = inputs()
    targets = targets.clamp(min=0)
    targets[:3] = (hidden @ weight.t()).argmax(-1)[:3]
    with ops.backend("triton"):
        logs, likeliest = token_likelihoods(hidden, weight, targets)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1)
    torch.testing.assert_close(logs.double(), exact[torch.arange(TOKENS), targets], rtol=0, atol=1e-5)
    assert likeliest.tolist() == (exact.argmax(-1) == targets).tolist()
    assert likeliest[:3].all()
