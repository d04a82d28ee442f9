"""Running a function from the graphs that inductor would be given, rewritten."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import cross_entropy

from residua import ops
from residua.model.decoder import Decoder
from residua.train.compile.rewrites.graphs import Rewrite, Rewrites
from tests.model.small import small, tokens_and_targets


@dataclass
class Differentiated:
    """A value and its gradients, and the forward and the backward graph that gave them."""

    values: list[Tensor]
    graphs: list[GraphModule]


def rewriting(*rewrites: Rewrite, seen: list[GraphModule]) -> Any:
    """A backend that rewrites the forward and the backward graph, keeps them in `seen`, and runs them as they are."""

    def compile(module: GraphModule) -> Callable[..., Any]:
        seen.append(rewritten(module, *rewrites))
        return seen[-1].forward

    return graphs_backend(compile)


def differentiated(
    function: Callable[..., Tensor], leaves: list[Tensor], *, rewrite: Rewrite, backend: str = "triton"
) -> tuple[Differentiated, Differentiated]:
    """Results of the graphs of a function as traced, and rewritten: both of one compilation."""
    torch._dynamo.reset()
    plain, ours = Differentiated([], []), Differentiated([], [])

    def compile(module: GraphModule) -> Callable[..., Any]:
        number = len(plain.graphs)
        plain.graphs.append(rewritten(GraphModule(module, deepcopy(module.graph))))
        ours.graphs.append(rewritten(module, rewrite))
        return lambda *args: running.graphs[number](*args)

    compiled = torch.compile(function, backend=graphs_backend(compile), fullgraph=True)
    with ops.backend(backend):
        for running in (plain, ours):
            out = compiled()
            running.values = [out, *torch.autograd.grad(out, leaves)]
    assert len(ours.graphs) == 2, "one forward, one backward: nothing was compiled again"
    return plain, ours


def rewritten(module: GraphModule, *rewrites: Rewrite) -> GraphModule:
    """The module, changed in place as before inductor compiles it."""
    Rewrites(*rewrites)(module.graph)
    module.recompile()
    return module


def graphs_backend(
    compile: Callable[[GraphModule], Callable[..., Any]], divide: Callable[..., Any] | None = None
) -> Any:
    """A backend that runs the output of `compile` for the forward and backward graphs, which `divide` separated."""
    # here, since `make check` collects files of this folder and compiles nothing
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    divide = divide or min_cut_rematerialization_partition

    def boxed(module: GraphModule, _: Any) -> Any:
        return make_boxed_func(compile(module))

    return aot_autograd(fw_compiler=boxed, bw_compiler=boxed, decompositions=select_decomp_table(), partition_fn=divide)


def keeping(graphs: list[GraphModule], *rewrites: Rewrite) -> Any:
    """A backend that rewrites the joint graph, divides it, and keeps the forward and the backward graph."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def divide(joint: GraphModule, *args: Any, **settings: Any) -> Any:
        return min_cut_rematerialization_partition(rewritten(joint, *rewrites), *args, **settings)

    def keep(module: GraphModule) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    return graphs_backend(keep, divide)


def calls(module: GraphModule) -> Counter[str]:
    return Counter(str(n.target) for n in module.graph.nodes if n.op == "call_function")


def model_loss(**tables: Any) -> tuple[Callable[[], Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Decoder(small(**tables))
    for name, p in model.named_parameters():
        if name.endswith("gate.up"):
            torch.nn.init.normal_(p)
    return loss_of(model), list(model.parameters())


def loss_of(model: torch.nn.Module) -> Callable[[], Tensor]:
    """A model's loss on three tokens."""
    tokens, targets = tokens_and_targets(length=3)
    return lambda: cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
