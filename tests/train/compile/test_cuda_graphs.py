"""CUDA graphs of micro-batches and of updates give the same losses, gradients and weights as running them."""

import pytest
import torch

import residua
from residua.config.run import RunConfig
from residua.data.loader import Batch
from residua.train.step import Step, arithmetic, build_step

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STEPS = 4
EXPERTS = "model.ffn={kind='moe', hidden=64, experts=8, top_k=2}"


def batches(config, seed, documents=False, sequence=None):
    generator = torch.Generator().manual_seed(seed)
    shape = (config.train.accumulate, config.train.micro_batch, (sequence or config.sequence) + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    segments = (torch.arange(shape[2] - 1) // 9).expand(shape[1], -1).contiguous() if documents else None
    return [Batch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), segments) for t in tokens]


def warmed_up(*changes, documents=False):
    """A step that has trained until its graphs were captured."""
    config = RunConfig.find("tiny").override(["train.accumulate=3", *changes])
    torch.manual_seed(0)
    torch._dynamo.reset()
    step = build_step(residua.build(config.model), config.train, torch.device("cuda"))
    for seed in range(STEPS):
        step(batches(config, seed, documents), 0.5)
    torch.cuda.synchronize()
    assert step._graphed is not None and True in step._graphed._graphs
    return config, step


def gradients(step, micro_batches, learn):
    """The gradients and losses of the micro-batches of one step."""
    share = torch.tensor(1 / len(micro_batches), device="cuda")
    part = None if step.balancer is None else share.double()
    losses = []
    if step._copies is not None:
        step._copies.begin()
    for i, batch in enumerate(micro_batches):
        losses += [loss.clone() for loss in learn(*step._moved(batch), share, part, first=i == 0)]
    found = [None if p.grad is None else p.grad.clone() for p in step.model.parameters()]
    step.optimizer.zero_grad(set_to_none=True)
    return losses + found


def ordinary(step):
    return lambda *inputs, first: step._graphed._ordinary(inputs)


def same(a, b):
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


@pytest.fixture(autouse=True)
def _exact():
    """Without this, the compiled gradient of an embedding is summed in no fixed order."""
    with arithmetic(RunConfig.find("tiny").override(["train.determinism=exact"]).train):
        yield


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("train.accumulate=1",),
        ("model.topology.kind=full_attnres",),
        ("model.topology.kind=multi_gate",),
        ("train.recompute=sublayers",),
        (EXPERTS,),
        (EXPERTS, "train.balance.load=same_step"),
        (EXPERTS, "train.balance.load=same_step", "train.accumulate=1"),
    ],
    ids=["additive", "one micro-batch", "full", "multi-gate", "recomputed", "experts", "same step", "alone"],
)
def test_replayed_passes_are_bit_identical_to_ordinary_ones(changes):
    config, step = warmed_up(*changes)
    new = batches(config, 99)
    replayed = gradients(step, new, step._graphed)
    same(replayed, gradients(step, new, ordinary(step)))
    same(replayed, gradients(step, new, step._graphed))


def test_replayed_steps_balance_experts_like_ordinary_ones():
    """The balancer's sums over micro-batches are written inside the graph."""
    found = []
    for graphs in ("auto", "off"):
        config = RunConfig.find("tiny").override(["train.accumulate=3", EXPERTS, f"train.graphs={graphs}"])
        torch.manual_seed(0)
        torch._dynamo.reset()
        step = build_step(residua.build(config.model), config.train, torch.device("cuda"))
        for seed in range(STEPS + 2):
            step(batches(config, seed), 0.5)
        found.append((step.balancer.state(), [p.detach().clone() for p in step.model.parameters()]))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])


@pytest.mark.parametrize("changes", [(), ("train.accumulate=1",), ("train.optimizer={kind='adamw', lr=1e-3}",)])
def test_replayed_updates_are_bit_identical_to_ordinary_ones(changes, monkeypatch):
    """While the learning rate changes, after an update without a graph, and in a second run of the same process."""
    found = []
    graphed = Step._build_graphed_update
    for build in (lambda step, passes: None, graphed):
        monkeypatch.setattr(Step, "_build_graphed_update", build)
        config, step = warmed_up(*changes)
        for seed in range(STEPS + 2):
            step(batches(config, seed, sequence=17 if seed == 4 else None), 1 / (1 + seed))
        weights = [p.detach().clone() for p in step.model.parameters()]
        captured = None if step._graphed_update is None else step._graphed_update._captured
        torch.manual_seed(1)
        step.restart(residua.build(config.model).cuda(), config.train)
        for seed in range(STEPS + 2):
            step(batches(config, seed), 1 / (1 + seed))
        found.append([*weights, *(p.detach().clone() for p in step.model.parameters()), step.totals().grad_norm])
    assert captured is not None and step._graphed_update._captured not in (None, captured)
    same([torch.as_tensor(x) for x in found[0]], [torch.as_tensor(x) for x in found[1]])


MICRO_BATCHES = {
    "documents": lambda config: batches(config, 99, documents=True),
    "another length, ungraphed": lambda config: batches(config, 99, sequence=17),
    # its gradients are not in the buffers that the graph of later micro-batches adds to
    "another length first": lambda config: [*batches(config, 98, sequence=17)[:1], *batches(config, 99)],
}


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_every_kind_of_micro_batch_gets_its_own_gradients(name):
    config, step = warmed_up(documents=name == "documents")
    new = MICRO_BATCHES[name](config)
    same(gradients(step, new, step._graphed), gradients(step, new, ordinary(step)))


def test_graphs_can_be_turned_off():
    config = RunConfig.find("tiny").override(["train.graphs=off"])
    assert build_step(residua.build(config.model), config.train, torch.device("cuda"))._graphed is None


def with_and_without_copies(monkeypatch, find):
    found = []
    for copying in (False, True):
        monkeypatch.setattr(Step, "copying", copying)
        found.append(find())
    return found


def test_working_copies_change_nothing(monkeypatch):
    """Compiled, rewritten and replayed: same weights with and without working copies."""

    def train():
        config, step = warmed_up("train.accumulate=1")
        return [p.detach().clone() for p in step.model.parameters()] + [step.evaluate(batches(config, 7))[0]]

    without, copied = with_and_without_copies(monkeypatch, train)
    same([torch.as_tensor(x) for x in without], [torch.as_tensor(x) for x in copied])


def test_working_copies_change_only_the_rounding_of_the_head(monkeypatch):
    """The head's are scaled and added to those of earlier micro-batches in one operation, which rounds once."""

    def differentiate():
        torch.manual_seed(0)
        torch._dynamo.reset()
        config = RunConfig.find("tiny").override(["train.accumulate=3", "model.head=untied"])
        step = build_step(residua.build(config.model), config.train, torch.device("cuda"))
        head = [name for name, p in step.model.named_parameters() if p is step.model.head_weight]
        found = gradients(step, batches(config, 1), step._learn)
        names = [name for name, _ in step.model.named_parameters()]
        return dict(zip(names, found[-len(names) :], strict=True)), head

    (without, (head,)), (copied, _) = with_and_without_copies(monkeypatch, differentiate)
    expected, found = without.pop(head), copied.pop(head)
    assert (found - expected).abs().max() <= 2**-23 * expected.abs().max()
    same(without.values(), copied.values())
