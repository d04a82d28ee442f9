"""The balance loss is that of the whole step, for any split into micro-batches and ranks; records of a run."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import residua
from residua.config import choices
from residua.config.run import Balance, RunConfig
from residua.model.moe import Router, Routing, balance_loss
from residua.storage.run import read_metrics
from residua.train.balance import Balancer, build_balancer
from residua.train.step import Step, build_step
from tests.train.conftest import Lab
from tests.train.test_resume import assert_same_run
from tests.train.test_step import CPU, batch, cut, make, weights

LOADS = ["previous_step", "same_step"]
pytestmark = pytest.mark.slow
EXPERTS = 4


@pytest.fixture
def mixture(config: RunConfig) -> RunConfig:
    """A balance loss as large as the loss itself, so that a mistake in it changes the weights."""
    return config.override(
        ["model.ffn={kind='moe', hidden=8, experts=4, top_k=2}", "train.balance={weight=1.0, router_z=0.1}"]
    )


made = partial(make, double=True)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("pieces", [2, 4])
def test_a_step_does_not_depend_on_its_micro_batches(mixture: RunConfig, load: str, pieces) -> None:
    big, small = (made(mixture, f"train.balance.load={load}") for _ in range(2))
    for seed in range(3):
        whole = batch(4, seed)
        big([whole])
        small(cut(whole, pieces))
    torch.testing.assert_close(weights(small.model), weights(big.model), rtol=1e-6, atol=1e-8)
    one, other = big.balancer.spread(), small.balancer.spread()
    assert (one.balance, one.router_z) == pytest.approx((other.balance, other.router_z), rel=1e-9)
    torch.testing.assert_close(torch.tensor(one.load), torch.tensor(other.load))


def test_same_step_has_the_gradient_of_the_whole_batch(mixture: RunConfig) -> None:
    step, whole = made(mixture, "train.balance.load=same_step"), batch(4)
    model = step.model
    ce, z, routing = model.routed_losses(whole.tokens, whole.targets, z_loss=1e-5)
    (ce + z + balance_loss(routing.load, routing.probability).sum() + 0.1 * routing.z.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    found: list[Tensor] = []
    step.optimizer.update = lambda numbers: found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    step._clip_norm = 1e9
    step(cut(whole, 2))
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("load", LOADS)
def test_recomputed_sublayers_are_counted_once(mixture: RunConfig, load: str) -> None:
    plain = made(mixture, f"train.balance.load={load}")
    again = made(mixture, f"train.balance.load={load}", "train.recompute=sublayers")
    for seed in range(2):
        for step in (plain, again):
            step(cut(batch(4, seed), 2))
    torch.testing.assert_close(weights(again.model), weights(plain.model))
    assert sum(map(sum, again.balancer.spread().load)) == pytest.approx(2.0)  # 1 for each layer
    assert again.balancer.spread() == plain.balancer.spread()


def on_ranks(count: int, work: Callable[[int, Callable[[Tensor], Tensor]], None]) -> None:
    """Run `work(rank, add_ranks)` on threads; `add_ranks` sums tensors over them, like an all-reduce."""
    barrier, given = threading.Barrier(count), [torch.empty(0)] * count

    def run(rank: int) -> None:
        def add_ranks(part: Tensor) -> Tensor:
            given[rank] = part
            barrier.wait()
            total = torch.stack(given).sum(0)
            barrier.wait()
            return total

        try:
            work(rank, add_ranks)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


def tiny_routing(seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    load, probability = (torch.rand(2, EXPERTS, generator=generator, dtype=torch.float64) for _ in range(2))
    return Routing(
        load / load.sum(-1, keepdim=True),
        (probability / probability.sum(-1, keepdim=True)).requires_grad_(),
        torch.rand(2, generator=generator, dtype=torch.float64).requires_grad_(),
    )


@pytest.mark.parametrize("load", LOADS)
def test_balance_losses_of_ranks_add_up_to_that_of_one(mixture: RunConfig, load: str) -> None:
    """Four micro-batches on one rank, or two on each of two: the parts of the loss add up to the same."""
    settings = Balance(weight=1.0, router_z=0.1, load=load)
    mixtures = [m for m in residua.build(mixture.model).modules() if type(m).__name__ == "MoE"]
    steps = [[tiny_routing(10 * s + i) for i in range(4)] for s in range(2)]

    def losses(balancer: Balancer, own: Sequence[Routing]) -> float:
        by_batch = {id(routing): routing for routing in own}
        balancer.begin(list(by_batch), [0.25] * len(own), by_batch.__getitem__)  # type: ignore[arg-type]
        total = sum(float(balancer.loss(routing, 0.25).detach()) for routing in own)
        balancer.end()
        return total

    alone = Balancer(settings, mixtures, CPU)
    expected = [losses(alone, step) for step in steps]
    found = [[0.0, 0.0], [0.0, 0.0]]
    balancers: list[Balancer] = []

    def work(rank: int, add_ranks: Callable[[Tensor], Tensor]) -> None:
        balancer = Balancer(settings, mixtures, CPU, add_ranks)
        balancers.append(balancer)
        for s, step in enumerate(steps):
            found[s][rank] = losses(balancer, step[2 * rank : 2 * rank + 2])

    on_ranks(2, work)
    assert [sum(parts) for parts in found] == pytest.approx(expected, rel=1e-12)
    assert expected[1] != pytest.approx(expected[0], rel=1e-3)
    for balancer in balancers:
        assert balancer.spread().balance == pytest.approx(alone.spread().balance, rel=1e-12)


def test_previous_step_mode_starts_with_the_balanced_loss() -> None:
    routing = tiny_routing(0)
    balancer = Balancer(Balance(weight=1.0, router_z=0.0), [_Mixture()] * 2, CPU)  # type: ignore[list-item]
    loss = balancer.loss(routing, 1.0)
    assert float(loss.detach()) == pytest.approx(2.0)  # 1, the minimum, for each layer
    balancer.end()
    own = balance_loss(routing.load, routing.probability).sum()
    torch.testing.assert_close(balancer.loss(routing, 1.0), own)


class _Mixture:
    count = EXPERTS
    router = Router(choices.MoE(hidden=8, experts=EXPERTS, top_k=2), 16, std=0.02)


BIASED = [
    "model.ffn.router={kind='sigmoid_scores', scale=2.0}",
    "train.balance={weight=0.0, router_z=0.0, bias_rate=0.02}",
]


def biases(step: Step) -> Tensor:
    return torch.stack([buffer for name, buffer in step.model.named_buffers() if name.endswith("router.bias")])


def test_a_bias_moves_by_the_load_of_the_whole_step(mixture: RunConfig) -> None:
    big, small = (made(mixture, *BIASED) for _ in range(2))
    big([batch(4)])
    small(cut(batch(4), 4))
    load = torch.tensor(big.balancer.spread().load, dtype=torch.float64)
    torch.testing.assert_close(biases(big), 0.02 * (1 / EXPERTS - load).sign())
    assert biases(big).any() and torch.equal(biases(big), biases(small))


@pytest.mark.gpu
def test_compiled_hybrid_mixture_learns_like_its_reference() -> None:
    """All in bfloat16: first losses differ by rounding; later ones by the effect of the optimizer on that."""
    config = RunConfig.find("tiny-hybrid-moe").override(["train.device=cuda", "model.context=128"])
    given = [batch(16, seed) for seed in range(20)]

    def losses(backend: str, compile: str) -> list[float]:
        torch.manual_seed(0)
        torch.compiler.reset()
        found = []
        chosen = config.override([f"train.compile={compile}"])
        with residua.ops.backend(backend):
            step = build_step(residua.build(chosen.model), chosen.train, torch.device("cuda"))
            for one in given:
                step.set_totals([0.0] * 4)
                step([one])
                found.append(step.totals().loss)
        return found

    ways = {"reference": ("reference", "off"), "fused": ("auto", "off"), "fused and compiled": ("auto", "on")}
    curves = {name: losses(*way) for name, way in ways.items()}
    told = "\n".join(f"{name}: {' '.join(f'{x:.4f}' for x in curve)}" for name, curve in curves.items())
    reference = curves.pop("reference")
    assert reference[-1] < 0.95 * reference[0], told
    for curve in curves.values():
        assert curve[0] == pytest.approx(reference[0], rel=0.003), told
        assert curve[:5] == pytest.approx(reference[:5], rel=0.02), told
        assert curve[-1] == pytest.approx(reference[-1], rel=0.05), told


def test_a_dense_model_has_no_balancer(config: RunConfig) -> None:
    assert build_balancer(residua.build(config.model), config.train.balance, CPU) is None


@pytest.mark.parametrize(
    "changes",
    [
        ["train.balance.load=previous_step"],
        pytest.param(["train.balance.load=same_step"], marks=pytest.mark.nightly),
        BIASED,
    ],
)
def test_resumed_mixture_equals_the_uninterrupted_one(mixture: RunConfig, changes: list[str], tmp_path: Path) -> None:
    lab = Lab(mixture.override(changes), tmp_path)
    lab.train(out="whole")
    lab.stop(3)
    lab.resume()
    assert_same_run(lab / "whole", lab / "run")


def test_run_logs_every_experts_load_and_prints_its_spread(mixture: RunConfig, tmp_path: Path) -> None:
    lab = Lab(mixture, tmp_path)
    lab.train()
    lines = [line for line in read_metrics(lab / "run" / "metrics.jsonl") if line["kind"] == "experts"]
    assert [line["step"] for line in lines] == [1, 2, 4, 6]
    for line in lines:
        assert len(line["load"]) == 2 and all(sum(layer) == pytest.approx(1, abs=1e-3) for layer in line["load"])
        assert line["lightest"] <= 1 <= line["heaviest"]
        assert line["balance"] > 0.9 and line["router_z"] > 0
    assert "experts" in lab.printed and "active per token" in lab.printed
    inspection = (tmp_path / "run" / "inspection.json").read_text()
    assert '"experts"' in inspection
