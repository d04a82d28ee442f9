"""Running a function from the graphs that inductor would be given, rewritten."""

from __future__ import annotations

from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from residua.train.rewrites.graphs import Rewrite, Rewrites


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
