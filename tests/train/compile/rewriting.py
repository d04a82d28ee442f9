"""Running a function from the graphs that inductor would be given, rewritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.nn.functional import cross_entropy

from residua import ops
from residua.model.decoder import Decoder
from residua.train.compile.rewrites.graphs import Rewrite, Rewrites
from tests.model.small import small, tokens_and_targets


def rewriting(*rewrites: Rewrite, seen: list[GraphModule]) -> Any:
    """A backend that rewrites the forward and the backward graph, keeps them in `seen`, and runs them as they are."""

    def compile(module: GraphModule, _: Any) -> Any:
        Rewrites(*rewrites)(module.graph)
        module.recompile()
        seen.append(module)
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=compile,
        bw_compiler=compile,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


def differentiated(function: Callable[..., Tensor], leaves: list[Tensor], *, rewrite: Callable[[Graph], None]) -> Any:
    """What the compiled function gives, its gradients, and its two graphs."""
    torch._dynamo.reset()
    seen: list[GraphModule] = []
    with ops.backend("triton"):
        out = torch.compile(function, backend=rewriting(rewrite, seen=seen), fullgraph=True)()
        gradients = torch.autograd.grad(out, leaves)
    return [out, *gradients], seen


def calls(module: GraphModule) -> Counter[str]:
    return Counter(str(n.target) for n in module.graph.nodes if n.op == "call_function")


def untouched(graph: Graph) -> None:
    pass


def model_loss(**tables: Any) -> tuple[Callable[[], Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Decoder(small(**tables))
    for name, p in model.named_parameters():
        if name.endswith("gate.up"):
            torch.nn.init.normal_(p)
    tokens, targets = tokens_and_targets()

    def loss() -> Tensor:
        return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return loss, list(model.parameters())
