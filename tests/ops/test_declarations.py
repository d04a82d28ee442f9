"""One declaration for each operator, with examples of its inputs; tracing knows the shapes of all results."""

import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from residua import ops
from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Draw, Sizes, declared_operators, example_cases
from residua.ops._runtime.library import launchers
from tests.nightly import only_nightly
from tests.ops.harness import assert_equal

SMALL = Sizes(tokens=12, width=64, length=12)  # the interpreter is slow
EXAMPLES = {name: (operator, case) for name, operator, case in example_cases(torch.device("cpu"), torch.float32, SMALL)}
UNREGISTERED = (
    "token_likelihoods", "momentum_directions", "adam_directions", "cautious_descent", "plain_descent",
    "encode_weights", "rotary_table", "scaled_rotary_table",
)  # fmt: skip
"""Operators that no compiler sees, or that are opaque only inside one."""
SLOW = ("squared_relu_ffn", "symmetric_product")  # they fuse large products only
# sorted rows have the shapes of routed ones
REGULAR = [name for name in EXAMPLES if not name.startswith((*SLOW, "expert_ffn, routed"))]
REUSING = ("head_piece", "encode_weights")
"""Operators that rewrite a stored tensor before each use, or whose results PyTorch cannot compare."""


def without_tokens() -> dict[str, tuple[Operator, Case]]:
    """The examples whose tensors depend on the number of tokens, with none; a step always has one."""
    draw = Draw(torch.device("cpu"), torch.float32, replace(SMALL, tokens=0))
    operators = {name: operator for name, operator in declared_operators().items() if name != "gated_delta_step"}
    cases = {f"{name} {case.label}": (o, case) for name, o in operators.items() for case in o.cases(draw)}
    return {name: (o, case) for name, (o, case) in cases.items() if any(x.numel() == 0 for x in case.leaves()[2])}


EMPTY = without_tokens()


def test_every_operator_is_declared_once_and_has_a_case() -> None:
    operators = declared_operators()
    assert len({id(operator) for operator in operators.values()}) == len(operators)
    assert [name for name in operators if not any(example.split(",")[0] == name for example in EXAMPLES)] == []
    public = [name for name in ops.__all__ if isinstance(getattr(ops, name), Operator)]
    assert set(public) <= set(operators)


def test_every_operator_belongs_to_a_folder_with_cases() -> None:
    folders = {operator.folder for operator, _ in EXAMPLES.values()}
    homes = {name: run.__module__ for name, run in launchers.items() if run.__module__.startswith("residua.ops.")}
    assert len(homes) > 60
    assert [name for name, home in homes.items() if home.removesuffix(".launch") not in folders] == []


@pytest.mark.parametrize("name", [name for name, (o, _) in EXAMPLES.items() if getattr(ops, o.__name__, None) is o])
def test_public_operators_accept_arguments_by_name(name: str) -> None:
    operator, case = EXAMPLES[name]
    named = inspect.signature(operator).bind(*case.args, **case.settings).arguments
    with ops.backend("triton"):
        assert operator.fuses(**named) == case.is_fused(operator)


class Shapes(TorchDispatchMode):
    """Also calls each of our operators on fake tensors, and compares the results."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("residua::")
        if name in launchers:
            self.called.add(name)
            with FakeTensorMode() as mode:
                fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs or {}))
                fakes = func(*fake_args, **fake_kwargs)
            assert list(map(layout, tree_leaves(fakes))) == list(map(layout, tree_leaves(made))), name
        return made


def layout(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device


@pytest.mark.slow
@pytest.mark.parametrize("name", only_nightly([name for name in EXAMPLES if name not in SLOW], but=REGULAR))
def test_tracing_knows_the_shapes_of_all_results(name: str) -> None:
    operator, case = EXAMPLES[name]
    with ops.backend("triton"):
        if not case.is_fused(operator):
            pytest.skip("has no kernel for these inputs")
        with nullcontext() if name in REUSING else SchemaCheckMode(), Shapes() as shapes:
            case.results(operator)
    assert bool(shapes.called) == (name not in UNREGISTERED)


def fused(operator: Operator, case: Case) -> bool:
    with ops.backend("triton"):
        return case.is_fused(operator)


TRAINED = [name for name in REGULAR if EXAMPLES[name][1].gradients and fused(*EXAMPLES[name])]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_operator_compiles_into_one_graph(name: str) -> None:
    operator, case = EXAMPLES[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args, **settings: operator(*args, **settings), backend="aot_eager", fullgraph=True)
    with ops.backend("triton"):
        assert_equal(case.results(compiled), case.results(operator))


def gradients_of_each_output(operator: Operator, case: Case, choice: str) -> list[list[Tensor]]:
    args, settings, leaves = case.leaves()
    with ops.backend(choice):
        values = operator(*args, **settings)
    outputs = tree_leaves(values if case.only is None else values[case.only])
    totals = [y.float().sin().sum() for y in outputs if isinstance(y, Tensor) and y.requires_grad]
    several = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return [list(torch.autograd.grad(total, leaves, **several)) for total in totals if len(totals) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_unused_outputs_do_not_affect_gradients(name: str) -> None:
    ours, plain = (gradients_of_each_output(*EXAMPLES[name], choice) for choice in ("triton", "reference"))
    for each, exact in zip(ours, plain, strict=True):
        torch.testing.assert_close(each, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", EMPTY)
def test_empty_input_gives_results_of_the_reference(name: str) -> None:
    operator, case = EMPTY[name]
    with ops.backend("triton"):
        if not case.is_fused(operator):
            pytest.skip("has no kernel for these inputs")
        made = case.results(operator)
    assert_equal(made, case.results(operator.reference))
