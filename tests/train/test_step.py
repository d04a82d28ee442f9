"""One optimizer step: accumulation, precision, recomputation, evaluation."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import residua
from residua.config.run import RunConfig
from residua.data.loader import Batch
from residua.machine import choose_device
from residua.model.decoder import Decoder
from residua.train import optimizer
from residua.train.compile import cuda_graphs
from residua.train.step import Step, arithmetic, build_step

CPU = torch.device("cpu")


def batch(sequences: int, seed: int = 0, ignored: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 257, (sequences, 17), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:, :ignored] = -100
    return Batch(tokens[:, :-1].clone(), targets)


def make(config: RunConfig, *changes: str, double: bool = False) -> Step:
    torch.manual_seed(0)
    config = config.override(list(changes))
    model = residua.build(config.model)
    return build_step(model.double() if double else model, config.train, CPU)


def cut(whole: Batch, pieces: int) -> list[Batch]:
    return [Batch(*parts) for parts in zip(whole.tokens.chunk(pieces), whole.targets.chunk(pieces), strict=True)]


def weights(model: Decoder) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_accumulation_equals_one_big_batch(config: RunConfig, optimizer: str) -> None:
    big, small = (make(config, f"train.optimizer.kind={optimizer}", double=True) for _ in range(2))
    for seed in range(3):
        whole = batch(4, seed)
        big([whole])
        small(cut(whole, 2))
    torch.testing.assert_close(weights(small.model), weights(big.model), rtol=1e-6, atol=1e-8)
    assert small.totals() == pytest.approx(big.totals())


def test_micro_batches_are_weighted_by_their_targets(config: RunConfig) -> None:
    """With masked documents, micro-batches have different numbers of targets."""
    full, sparse = batch(2, 1), batch(2, 2, ignored=12)
    together = Batch(torch.cat([full.tokens, sparse.tokens]), torch.cat([full.targets, sparse.targets]))
    big, small = make(config, double=True), make(config, double=True)
    big([together])
    small([full, sparse])
    assert small.totals().loss == pytest.approx(big.totals().loss, rel=1e-6)
    torch.testing.assert_close(weights(small.model), weights(big.model), rtol=1e-6, atol=1e-8)


def test_the_reported_loss_is_pure_cross_entropy(config: RunConfig) -> None:
    plain, penalised = make(config, "train.z_loss=0.0"), make(config, "train.z_loss=0.5")
    plain([batch(2)])
    penalised([batch(2)])
    assert penalised.totals().loss == plain.totals().loss
    assert plain.totals().z == 0 and penalised.totals().z > 1
    assert not torch.equal(weights(plain.model), weights(penalised.model))


def test_gradients_are_clipped_to_the_norm(config: RunConfig) -> None:
    """With a tiny norm AdamW's means are tiny, and the norm reported is the one before clipping."""
    step = make(config, "train.clip_norm=1e-3", "train.optimizer.kind=adamw")
    step([batch(2)])
    means = [step.optimizer.state[p]["mean"] for p in step.model.parameters()]
    assert torch.cat([m.flatten() for m in means]).norm() == pytest.approx(1e-4, rel=1e-3)
    assert step.totals().grad_norm > 0.1


def test_recomputed_sublayers_train_bit_identically(config: RunConfig) -> None:
    kept, recomputed = make(config), make(config, "train.recompute=sublayers")
    for seed in range(2):
        kept([batch(2, seed)])
        recomputed([batch(2, seed)])
    assert torch.equal(weights(kept.model), weights(recomputed.model))


def test_recomputed_sublayers_keep_only_their_inputs(config: RunConfig) -> None:
    saved = []
    for change in ("train.recompute=none", "train.recompute=sublayers"):
        step = make(config, change)
        held: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: held.append(t.numel()) or t, lambda t: t):
            step.model.loss(batch(2).tokens, batch(2).targets)
        saved.append(sum(held))
    assert saved[1] < 0.6 * saved[0]


def test_weights_stay_fp32_under_bf16(config: RunConfig) -> None:
    step = make(config, "train.precision=bfloat16")
    assert step.precision is torch.bfloat16
    step([batch(2)])
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
    assert math.isfinite(step.totals().loss)


ROUNDED = {
    "additive": [],
    "anchors and gates": [
        "model.attention.gate=elementwise", "model.anchors.kind=exoformer", "model.anchors.mixing.kind=dynamic",
        "model.norm={kind='gatednorm', rank=4}",
    ],
    "experts": ["model.ffn.kind=moe", "model.ffn.hidden=8", "model.ffn.experts=4", "model.ffn.top_k=2"],
    "linear attention": ["model.attention={kind='gated_deltanet', key_heads=2, value_heads=2}"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("changes", ROUNDED.values(), ids=list(ROUNDED))
def test_working_copies_round_exactly_like_autocast(config: RunConfig, changes, monkeypatch) -> None:
    """Same bits with and without working copies, over several micro-batches and an evaluation after an update."""
    found = []
    for copying in (False, True):
        monkeypatch.setattr(Step, "copying", copying)
        step = make(config, "train.precision=bfloat16", *changes)
        for seed in range(3):
            step([batch(2, seed), batch(3, 7)])
        found.append([weights(step.model), *step.evaluate([batch(2)]), *step.totals()])
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]


def test_frozen_weights_stay_and_shared_weights_train_once(config: RunConfig, monkeypatch) -> None:
    found = []
    for copying in (False, True):
        monkeypatch.setattr(Step, "copying", copying)
        torch.manual_seed(0)
        model = residua.build(config.model)
        first, second = model.sublayers[0].body, model.sublayers[2].body
        second.project.weight = first.project.weight
        second.out.weight.requires_grad_(False)
        frozen = second.out.weight.clone()
        step = build_step(model, config.override(["train.precision=bfloat16"]).train, CPU)
        for seed in range(2):
            step([batch(2, seed), batch(3, 7)])
        assert torch.equal(second.out.weight, frozen)
        found.append(weights(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ["train.precision=bfloat16", "train.recompute=sublayers"],
        pytest.param(["train.precision=bfloat16"], marks=pytest.mark.nightly),
        pytest.param(["train.recompute=sublayers"], marks=pytest.mark.nightly),
    ],
    ids=["both", "working copies", "recomputed"],
)
def test_compiled_step_is_one_graph_and_equals_a_plain_one(config: RunConfig, changes, monkeypatch) -> None:
    """With working copies, and sublayers that are computed again."""
    compile_plainly = torch.compile
    settings = {"backend": "aot_eager", "fullgraph": True}
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_plainly(f, **settings))
    plain, compiled = (make(config, *changes, "model.layers=1", f"train.compile={on}") for on in ("off", "on"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            for step in (plain, compiled):
                step([batch(2, seed), batch(2, 7)])
    assert compiled.compiled and not plain.compiled
    torch.testing.assert_close(weights(compiled.model), weights(plain.model), rtol=1e-4, atol=1e-5)


def test_evaluation_averages_over_targets_without_side_effects(config: RunConfig) -> None:
    step = make(config)
    before = weights(step.model).clone()
    batches = [batch(2, 1), batch(2, 2, ignored=12)]
    loss, tokens = step.evaluate(batches)
    parts = [step.model.loss(b.tokens, b.targets).item() * int((b.targets != -100).sum()) for b in batches]
    assert tokens == 40 and loss == pytest.approx(sum(parts) / 40)
    assert torch.equal(before, weights(step.model)) and step.totals().steps == 0


def test_exact_arithmetic_is_set_and_restored(config: RunConfig) -> None:
    for change, expected in (("train.determinism=exact", True), ("train.determinism=fast", False)):
        with arithmetic(config.override([change]).train):
            assert torch.are_deterministic_algorithms_enabled() is expected
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_requesting_a_missing_gpu_is_refused(config: RunConfig) -> None:
    with pytest.raises(ValueError, match=r"train\.device is 'cuda' but PyTorch sees no GPU"):
        choose_device("cuda", "train.device")


@pytest.mark.gpu
def test_a_gpu_step_is_compiled_bf16_and_learns(config: RunConfig) -> None:
    config = config.override(["train.device=cuda", "model.width=128", "model.context=64"])
    step = build_step(residua.build(config.model), config.train, choose_device(config.train.device))
    assert step.compiled and step.precision is torch.bfloat16
    losses = []
    for _ in range(20):
        step.set_totals([0.0] * 4)
        step([batch(4)], rate=0.3)
        losses.append(step.totals().loss)
    assert losses[-1] < losses[0] - 1


class Recorder(TorchDispatchMode):
    """Stands in for a CUDA graph: repeats operations on the same tensors. Recording them changes none."""

    calls, before = (), ()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.before += tuple((t, t.clone()) for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        self.calls += ((operation, args, kwargs or {}, operation(*args, **kwargs or {})),)
        return self.calls[-1][-1]

    @torch.no_grad()
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, value in reversed(self.before):
            tensor.copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, kwargs, outputs in self.calls:
            for mine, new in zip(tree_leaves(outputs), tree_leaves(operation(*args, **kwargs)), strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(new)


def updated(config: RunConfig, graphed: bool) -> torch.Tensor:
    """Weights after a second run with other rates and another norm; once, its gradients are not the graph's."""
    step = make(config)
    gradients = [torch.zeros_like(p) for p in step._parameters]
    passes: Any = SimpleNamespace(stream=SimpleNamespace(device=CPU), capturing=lambda graph: graph)
    passes.wrote_gradients = lambda: number != 8
    assert isinstance(step._build_graphed_update(passes), cuda_graphs.GraphedUpdate), "the default"
    step._build_graphed_update = lambda _: cuda_graphs.GraphedUpdate(step._descend, passes) if graphed else None  # type: ignore[method-assign]
    step._graphed_update = step._build_graphed_update(None)
    for number in range(11):
        for p, gradient in zip(step._parameters, gradients, strict=True):
            p.grad = torch.zeros_like(gradient) if number == 8 else gradient.zero_()
        step([batch(2, number)], 1 / (1 + number))
        if number == 3:
            step.restart(make(config).model, config.train.model_copy(update={"clip_norm": 0.02}))
    assert not graphed or step._graphed_update._captured is not None
    return weights(step.model)


def test_graphed_updates_equal_ordinary_ones(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    monkeypatch.setattr(cuda_graphs, "_on", lambda stream, run: run())
    adam = optimizer.adam_directions  # like descents without kernels, it needs its numbers on the host
    monkeypatch.setattr(optimizer, "adam_directions", lambda m, v, g, betas, eps: adam(m, v, g, betas, 1e-8))
    descend = lambda xs, us, rate, decay: [x.sub_(rate * u + decay * x) for x, u in zip(xs, us, strict=True)]  # noqa: E731
    monkeypatch.setattr(optimizer, "_DESCENTS", dict.fromkeys(("cautious", "plain"), descend))
    assert torch.equal(updated(config, graphed=True), updated(config, graphed=False))
