"""Every two choices meet in a model that builds, runs, learns and stays finite; in `make test`, those with anchors."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import residua
from residua.config import choices
from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.model.decoder import Decoder
from tests.model.combinations import FACTORS, ROWS, TABLES, config_of, fits, name_of
from tests.model.pairwise import Row, pairs_of, possible_pairs
from tests.model.small import small, tokens_and_targets
from tests.nightly import covering

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Dead:
    """Parameters whose first gradient is zero by the mathematics, the models they are in, and the reason."""

    parameters: str
    when: Callable[[ModelConfig], bool]
    reason: str

    def covers(self, name: str, config: ModelConfig) -> bool:
        return re.search(self.parameters, name) is not None and self.when(config)


DEAD_AT_START = [
    Dead(
        r"norm\.gate\.down$",
        lambda c: isinstance(c.norm, choices.LowRankGate) and c.norm.activation == "sigmoid",
        "a sigmoid gate starts from up = 0, and down acts through up",
    ),
    Dead(
        r"^topology\.reads\.\d+\.gain$",
        lambda c: isinstance(c.topology, choices.AttentionResidual),
        "the key gain multiplies the query, which starts at zero",
    ),
    Dead(
        r"body\.mix\.gamma\.down\.weight$",
        lambda c: isinstance(getattr(c.anchors, "mixing", None), choices.DynamicMixing),
        "γ's second matrix starts at zero, and the first acts through it",
    ),
    Dead(
        r"^topology\.junctions\.\d+\.maps\.(alpha|beta)$",
        lambda c: (
            isinstance(c.topology, choices.SinglePassHyper)
            or (
                isinstance(c.topology, choices.HyperConnections | choices.FracConnections)
                and c.topology.weights == "dynamic"
            )
        ),
        "the scale multiplies tanh of a map that starts at zero",
    ),
    Dead(
        r"^(sublayers|anchors)\.",
        lambda c: isinstance(c.topology, choices.ScaledSum) and c.topology.start == 0,
        "ReZero starts with every output multiplied by zero",
    ),
    Dead(
        r"^topology\.junctions\.\d+\.alpha$",
        lambda c: isinstance(c.topology, choices.ManifoldHyper | choices.ManifoldHyperLite),
        "α multiplies a projection φ that starts at zero",
    ),
    Dead(
        r"^topology\.(weights|junctions)\.\d+\.down$",
        lambda c: isinstance(c.topology, choices.Mudd | choices.Laurel),
        "W2 starts at zero, and W1 acts through it; so do B and A",
    ),
]


def dead_at_start(name: str, config: ModelConfig) -> bool:
    return any(entry.covers(name, config) for entry in DEAD_AT_START)


def silent(gradients: dict[str, torch.Tensor], config: ModelConfig) -> set[str]:
    """The parameters without a gradient, but for cyclic mixes: shifts of equal streams, or of their sum, are equal."""
    cyclic = isinstance(config.topology, choices.HyperConnections) and config.topology.mix == "cyclic"
    mixes = re.compile(r"topology\.junctions\.\d+\.mix" if cyclic else r"(?!)")
    return {name for name, g in gradients.items() if not g.any() and not mixes.fullmatch(name)}


def wakes_twice(config: ModelConfig) -> bool:
    """Whether something acts through zero twice: ReZero's scales, and a matrix inside a sublayer."""
    return isinstance(config.topology, choices.ScaledSum) and config.topology.start == 0


def learn(model: Decoder) -> dict[str, torch.Tensor]:
    """One backward pass: the gradient of every parameter, which must be there."""
    model.zero_grad()
    loss = model.loss(*tokens_and_targets(), z_loss=1e-3)
    assert loss.isfinite()
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing
    return {name: p.grad for name, p in model.named_parameters()}


def test_rows_cover_exactly_the_possible_pairs() -> None:
    met = set().union(*(pairs_of(row) for row in ROWS))
    assert met == possible_pairs(FACTORS, fits)
    second, longest = sorted(map(len, FACTORS.values()))[-2:]
    assert len(ROWS) < 1.25 * longest * second


def test_rows_omit_only_pairs_the_configuration_refuses() -> None:
    for anchors, table in TABLES["anchors"].items():
        for attention, mixer in TABLES["attention"].items():
            if fits({"anchors": anchors, "attention": attention}):
                small(anchors=table, attention=mixer)
            else:
                with pytest.raises(ConfigError):
                    small(anchors=table, attention=mixer)


@pytest.mark.parametrize("row", covering(ROWS, ("attention", "anchors")), ids=name_of)
def test_every_parameter_learns_unless_it_must_start_silent(row: Row) -> None:
    config = config_of(row)
    model = residua.build(config)
    gradients = learn(model)
    assert all(g.isfinite().all() for g in gradients.values())
    assert silent(gradients, config) == {name for name in gradients if dead_at_start(name, config)}

    for _ in range(2 if wakes_twice(config) else 1):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * gradients[name]
        gradients = learn(model)
    assert not silent(gradients, config)


@pytest.mark.parametrize("row", covering(ROWS), ids=name_of)
def test_half_precision_is_finite_and_near_single_precision(row: Row) -> None:
    """Both ways: weights in bfloat16, and float32 weights under autocast."""
    model = residua.build(config_of(row))
    tokens, targets = tokens_and_targets()
    with torch.no_grad():
        reference = model.loss(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.loss(tokens, targets)
    mixed.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    model.zero_grad()
    model = model.to(torch.bfloat16)
    half = model.loss(tokens, targets)
    half.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())
    for loss in (mixed, half):
        torch.testing.assert_close(loss, reference, rtol=0.05, atol=0)


def test_declared_matrix_parts_add_up_to_own_parameters() -> None:
    """Optimizers that orthogonalise go by this declaration; each parameter is declared once at most."""
    for row in ROWS[::5]:
        with torch.device("meta"):
            model = residua.build(config_of(row))
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            for name, parts in getattr(module, "hidden_matrices", {}).items():
                assert own[name].dim() == 2 and sum(parts) == own[name].shape[0]


def test_zero_initialised_head_and_outputs_learn_in_turn() -> None:
    """ExoFormer's recipe: the head first, then the output projections, then everything before them."""
    config = small(
        head={"kind": "untied", "init": "zero"},
        init={"std": 0.2, "output": "zero"},
        attention={"kind": "softmax", "heads": 2, "gate": "elementwise"},
        anchors={"kind": "exoformer"},
    )
    model = residua.build(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def awake() -> set[str]:
        return {name for name, g in learn(model).items() if g.any()}

    assert awake() == {"unembed.weight"}
    optimizer.step()
    outputs = {f"sublayers.{k}.body.out.weight" for k in range(6)}
    assert awake() == {"unembed.weight", "embed.weight", "norm.weight"} | outputs
    optimizer.step()
    assert awake() == {name for name, _ in model.named_parameters()}
