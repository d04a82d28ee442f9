"""Expert load of Hugging Face mixtures: the choices that a layer's router hands to its experts are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from residua.diagnose.observe import Observation


class ExpertCounter:
    """Counts, in one layer, how often each expert is chosen.

    transformers calls a mixture's experts with the tokens, the numbers of the chosen experts [tokens, k] and their
    weights. The experts are a module with parameters [E, ·, ·], or a list of E modules. Where they are called otherwise
    (Llama 4), the router's scores [tokens, E] tell, if they are zero for all experts that are not chosen.
    """

    def __init__(self, layer: int, module: nn.Module, seen: Observation) -> None:
        self.layer, self.seen = layer, seen
        self.found = dict(mixtures(module))
        self.routers = [part for part in module.modules() if not isinstance(part, nn.ModuleList)] if self.found else []

    def attach(self, runs: Callable[[int], bool]) -> list[Any]:
        """Attach the hooks; they count while `runs(layer)` is true, since several layers may share a module."""

        def count(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            chosen = choices([*given, *named.values()], self.seen.tokens.numel())
            if chosen is not None and runs(self.layer):
                self.seen.loads[self.layer] = load(chosen, self.found[module])

        def read(module: nn.Module, given: Any, output: Any) -> None:
            if runs(self.layer) and self.layer not in self.seen.loads and isinstance(output, tuple):
                chosen = scored(output[0], self.seen.tokens.numel(), set(self.found.values()))
                if chosen is not None:
                    self.seen.loads[self.layer] = chosen.double().sum(0) / chosen.sum()

        handles = [module.register_forward_pre_hook(count, with_kwargs=True) for module in self.found]
        return [*handles, *(part.register_forward_hook(read) for part in self.routers)]


def mixtures(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The modules inside that hold several experts, and how many each holds."""
    for part in module.modules():
        own = [p.shape[0] for p in part.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        if isinstance(part, nn.ModuleList):
            own = [len(part)] if len(part) > 1 and len({type(expert) for expert in part}) == 1 else []
        if own:
            stated = getattr(part, "num_experts", None)
            yield part, max([*own, *([stated] if isinstance(stated, int) else [])])


def choices(given: list[Any], tokens: int) -> Tensor | None:
    """The numbers of the chosen experts among a call's arguments; None if there are none."""
    for x in given:
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32) or x.dim() < 2:
            continue
        if x.numel() == tokens * x.shape[-1]:
            return x
    return None


def scored(scores: Any, tokens: int, experts: set[int]) -> Tensor | None:
    """[tokens, E], true where a router's score is not zero, if every token has as many chosen experts, and not all."""
    if (
        not isinstance(scores, Tensor)
        or scores.dim() != 2
        or scores.shape[0] != tokens
        or scores.shape[1] not in experts
    ):
        return None
    chosen = scores != 0
    counts = chosen.sum(1)
    return chosen if bool((counts == counts[0]).all()) and 0 < int(counts[0]) < scores.shape[1] else None


def load(chosen: Tensor, experts: int) -> Tensor:
    """[E], the share of the choices that each expert got."""
    counts = torch.bincount(chosen.flatten().long().clamp(min=0), minlength=experts)[:experts].double()
    return counts / counts.sum().clamp(min=1)
