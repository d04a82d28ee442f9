"""Muon, AdamW, cautious and plain decay against a float64 reference written here from the equations."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from residua.config.run import AdamW, Muon, RunConfig
from residua.config.settings import ConfigError
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.rates import RatedModule
from residua.train.optimizer import build_optimizer, hidden_matrices, polar_express
from tests.ops.harness import assert_equal


class Declared(nn.Module):
    def __init__(self, rows: int, columns: int, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.hidden_matrices = {"weight": parts}


class StandIn(nn.Module):
    """Two matrices, one fused of three parts and one whole, and a gain that nobody declares."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fused = Declared(3 * width, width, (width, width, width))
        self.out = Declared(width, 2 * width, (width,))
        self.gain = nn.Parameter(torch.ones(width))

    def set_gradients(self, seed: int) -> None:
        """Random gradients, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


def stepped(model: StandIn, config: Muon | AdamW, seed: int = 0) -> dict[str, Tensor]:
    """The weights after one step on random gradients."""
    optimizer = build_optimizer(model, config)
    model.set_gradients(seed)
    optimizer.step()
    return model.weights()


PUBLISHED = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def reference_polar(gradient: np.ndarray) -> np.ndarray:
    """The polynomials applied to the singular values directly."""
    left, values, right = np.linalg.svd(gradient, full_matrices=False)
    values = values / (1.02 * np.linalg.norm(gradient) + 1e-6)
    for a, b, c in PUBLISHED:
        values = a * values + b * values**3 + c * values**5
    return left @ np.diag(values) @ right


class ReferenceMuon:
    def __init__(self, weight: np.ndarray, parts: tuple[int, ...], config: Muon) -> None:
        self.weight, self.parts, self.config = weight.copy(), parts, config
        self.buffer = np.zeros_like(weight)

    def step(self, gradient: np.ndarray) -> None:
        beta, eta, decay = self.config.momentum, self.config.lr, self.config.weight_decay
        self.buffer = beta * self.buffer + (1 - beta) * gradient
        nesterov = beta * self.buffer + (1 - beta) * gradient
        start = 0
        for rows in self.parts:
            update = reference_polar(nesterov[start : start + rows])
            update *= max(1, rows / gradient.shape[1]) ** 0.5
            block = self.weight[start : start + rows]
            block -= eta * (update + decay * (update * block >= 0) * block)
            start += rows


def reference_adamw(weight: np.ndarray, gradients: list[np.ndarray], config: AdamW, decay: float) -> np.ndarray:
    mean = square = np.zeros_like(weight)
    beta1, beta2 = config.betas
    for t, gradient in enumerate(gradients, 1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        update = (mean / (1 - beta1**t)) / (np.sqrt(square / (1 - beta2**t)) + config.eps)
        weight = weight - config.lr * (update + decay * (update * weight >= 0) * weight)
    return weight


def test_muon_matches_the_reference_in_float64() -> None:
    model = StandIn().double()
    config = Muon(lr=0.05, weight_decay=0.3)
    optimizer = build_optimizer(model, config)
    references = {
        "fused.weight": ReferenceMuon(model.fused.weight.detach().numpy(), (16, 16, 16), config),
        "out.weight": ReferenceMuon(model.out.weight.detach().numpy(), (16,), config),
    }
    for seed in range(4):
        model.set_gradients(seed)
        for name, reference in references.items():
            gradient = model.get_parameter(name).grad
            reference.step(gradient.numpy())
        optimizer.step()
    for name, reference in references.items():
        np.testing.assert_allclose(model.weights()[name].numpy(), reference.weight, rtol=1e-10, atol=1e-12)


def test_update_of_a_tall_matrix_scales_with_root_aspect_ratio() -> None:
    model = StandIn()
    model.fused.hidden_matrices = {"weight": (48,)}
    before = model.weights()["fused.weight"]
    moved = before - stepped(model, Muon(lr=0.1, weight_decay=0.0))["fused.weight"]
    assert float(torch.linalg.svdvals(moved / 0.1).median()) == pytest.approx(3**0.5, rel=0.1)


def test_adamw_matches_the_reference_in_float64() -> None:
    model = StandIn().double()
    config = AdamW(lr=0.02, weight_decay=0.5)
    optimizer = build_optimizer(model, config)
    before, gradients = model.weights(), []
    for seed in range(4):
        model.set_gradients(seed)
        gradients.append({n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    for name, decay in {"gain": 0.0, "out.weight": 0.5}.items():
        expected = reference_adamw(before[name].numpy(), [g[name] for g in gradients], config, decay)
        np.testing.assert_allclose(model.weights()[name].numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)], ids=["square", "wide", "tall"])
def test_polar_express_is_orthogonal_within_its_band(shape: tuple[int, int]) -> None:
    """Singular values between 1e-3 and 1 of the norm end between 0.8588 and 1.1412, the minimax error of 5 steps."""
    wide = min(shape)
    left, _ = torch.linalg.qr(torch.randn(shape[0], wide))
    right, _ = torch.linalg.qr(torch.randn(shape[1], wide))
    gradients = torch.stack([left * torch.logspace(0, -power, wide) @ right.T for power in (0.0, 1.0, 2.0)])
    singular = torch.linalg.svdvals(polar_express(gradients))
    assert singular.min() > 1 - 0.1412 and singular.max() < 1 + 0.1412


@pytest.mark.gpu
def test_polar_express_in_bf16_on_a_gpu_stays_close_to_float64() -> None:
    gradients = torch.randn(6, 256, 512, dtype=torch.float64)
    exact = polar_express(gradients)
    fast = polar_express(gradients.to("cuda", torch.bfloat16)).double().cpu()
    assert (fast - exact).norm() / exact.norm() < 0.02


def test_a_stack_is_orthogonalised_matrix_by_matrix() -> None:
    stack = torch.randn(5, 12, 20, dtype=torch.float64) * torch.logspace(-6, 6, 5, dtype=torch.float64)[:, None, None]
    apart = torch.stack([polar_express(matrix) for matrix in stack])
    torch.testing.assert_close(polar_express(stack), apart)


def test_only_declared_parameters_are_matrices() -> None:
    model = StandIn()
    assert hidden_matrices(model) == {"fused.weight": (16, 16, 16), "out.weight": (16,)}
    optimizer = build_optimizer(model, Muon())
    assert [group["names"] for group in optimizer.param_groups] == [["fused.weight", "out.weight"], ["gain"]]


@pytest.mark.parametrize("config", [Muon(), AdamW()], ids=["muon", "adamw"])
def test_closure_computes_the_gradients_and_returns_its_loss(config: Muon | AdamW) -> None:
    """As torch's own optimizers call it: with gradients enabled, once, before the update."""
    given, alone = StandIn(), StandIn()
    alone.load_state_dict(given.state_dict())

    def loss(model: StandIn) -> torch.Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    def closure() -> torch.Tensor:
        value = loss(given)
        value.backward()
        return value

    expected = loss(alone)
    expected.backward()
    assert build_optimizer(alone, config).step() is None
    assert torch.equal(build_optimizer(given, config).step(closure), expected)
    assert_equal(given.weights().values(), alone.weights().values())


def test_a_parameter_without_gradient_is_unchanged() -> None:
    model = StandIn()
    optimizer = build_optimizer(model, Muon())
    model.set_gradients(0)
    model.out.weight.grad = model.gain.grad = None
    before = model.weights()
    optimizer.step()
    after = model.weights()
    assert not torch.equal(before["fused.weight"], after["fused.weight"])
    assert torch.equal(before["out.weight"], after["out.weight"]) and torch.equal(before["gain"], after["gain"])


def resumes(model: StandIn, config: Muon | AdamW, steps: int) -> dict[str, Tensor]:
    """The tensors that are saved after some steps, from which a copy continues bit for bit."""
    optimizer, copy = build_optimizer(model, config), type(model)()
    for seed in range(steps):
        model.set_gradients(seed)
        optimizer.step()
    copy.load_state_dict(model.state_dict())
    second, saved = build_optimizer(copy, config), {name: t.clone() for name, t in optimizer.tensors().items()}
    second.load_tensors({name: tensor.clone() for name, tensor in saved.items()})
    for one, its_optimizer in ((model, optimizer), (copy, second)):
        one.set_gradients(9)
        its_optimizer.step()
    assert_equal(model.weights().values(), copy.weights().values())
    return saved


@pytest.mark.parametrize("config", [Muon(), AdamW(weight_decay=0.1)], ids=["muon", "adamw"])
def test_restored_state_continues_bit_identically(config: Muon | AdamW) -> None:
    resumes(StandIn(), config, 3)


@pytest.mark.slow  # torch's own optimizers import its compiler
def test_adamw_with_plain_decay_matches_torch_in_float64() -> None:
    ours, theirs = StandIn().double(), StandIn().double()
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, AdamW(lr=0.02, weight_decay=0.5, decay="plain"))
    groups = [
        {"params": [theirs.fused.weight, theirs.out.weight], "weight_decay": 0.5},
        {"params": [theirs.gain], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    for seed in range(4):
        for model, its in ((ours, optimizer), (theirs, torchs)):
            model.set_gradients(seed)
            its.step()
    torch.testing.assert_close(ours.weights(), theirs.weights(), rtol=1e-10, atol=1e-12)


def test_muon_with_plain_decay_shrinks_all_weights_equally() -> None:
    """Muon's update does not depend on the weight: with decay the step differs by η·wd·x, at every element."""
    moved = {}
    for decay in (0.0, 0.3):
        torch.manual_seed(0)
        model = StandIn().double()
        before = model.weights()
        moved[decay] = stepped(model, Muon(lr=0.05, weight_decay=decay, decay="plain"))
    for name in ("fused.weight", "out.weight"):
        shrunk = moved[0.0][name] - moved[0.3][name]
        torch.testing.assert_close(shrunk, 0.05 * 0.3 * before[name], rtol=1e-9, atol=1e-12)
    assert torch.equal(moved[0.0]["gain"], moved[0.3]["gain"])


def test_mgr_presets_decay_only_matrices_and_embedding() -> None:
    """The paper's table 3 has one weight decay, 0.1; nanoGPT, which its code is based on, decays no vectors."""
    small = ["layers=5", "width=32", "attention.heads=2", "ffn.hidden=32", "vocab_size=64"]
    for preset in ("mgr-s-competitive4", "mgr-m-full", "mgr-l-block8"):
        run = RunConfig.find(preset).override([f"model.{change}" for change in small])
        model = Decoder(run.model)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        optimizer = build_optimizer(model, run.train.optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moved = {name: not torch.equal(before[name], parameter) for name, parameter in model.named_parameters()}
        matrices = {"embed.weight", *hidden_matrices(model)}
        assert moved == {name: name in matrices for name in moved}
        rate = run.train.optimizer.rest.lr
        torch.testing.assert_close(model.embed.weight, (1 - 0.1 * rate) * before["embed.weight"])


def test_decay_is_cautious_by_default_and_unknown_rules_refused() -> None:
    optimizers = [RunConfig.find(name).train.optimizer for name in ("tiny", "exoformer-base")]
    assert {table.decay for table in (Muon(), AdamW(), *optimizers)} == {"cautious"}
    with pytest.raises(ConfigError, match=r"train\.optimizer\.decay = 'plane' is not a choice: did you mean 'plain'"):
        RunConfig.find("tiny").override(["train.optimizer.decay=plane"])


class Rated(StandIn, RatedModule):
    """The stand-in with two scalars in a list that want a hundredth of the rate, and a matrix that wants a quarter."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars = nn.ParameterList(torch.ones(()) for _ in range(2))

    def rate_factors(self) -> dict[str, float]:
        return {"scalars": 1 / 128, "out.weight": 0.25, "gain": 1.0}


def moves(model: Rated, config: Muon | AdamW) -> dict[str, Tensor]:
    """The update of each parameter in one step; parameters start at zero so that nothing is rounded."""
    model.load_state_dict({name: torch.zeros_like(weight) for name, weight in model.weights().items()})
    return stepped(model, config)


@pytest.mark.parametrize("config", [Muon(embedding_decay=0.1), AdamW()], ids=["muon", "adamw"])
def test_a_declared_factor_scales_an_update_exactly(config: Muon | AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    rated = moves(Rated(), config)
    monkeypatch.setattr(Rated, "rate_factors", lambda self: {})
    plain = moves(Rated(), config)
    factors = {"scalars.0": 1 / 128, "scalars.1": 1 / 128, "out.weight": 0.25}
    for name, move in plain.items():
        assert torch.equal(rated[name], factors.get(name, 1.0) * move) and move.any(), name


def test_groups_with_a_factor_are_named_saved_and_resumed() -> None:
    model = Rated()
    optimizer = build_optimizer(model, Muon(lr=0.01))
    titles = {group["title"]: (group["names"], group["peak_lr"]) for group in optimizer.param_groups}
    assert titles["matrices x0.25"] == (["out.weight"], 0.0025)
    assert titles["rest x0.0078125"] == (["scalars.0", "scalars.1"], 0.003 / 128)
    assert int(resumes(model, Muon(lr=0.01), 2)["adamw-rest x0.0078125/steps"]) == 2


@pytest.mark.parametrize("declared", [{"gian": 0.5}, {"gain": 0.0}], ids=["misspelt", "zero"])
def test_a_rate_factor_that_matches_no_parameter_is_refused(declared: dict[str, float], monkeypatch) -> None:
    monkeypatch.setattr(Rated, "rate_factors", lambda self: declared)
    with pytest.raises(UserError, match=r"Rated\.rate_factors gives 'g"):
        build_optimizer(Rated(), Muon())
