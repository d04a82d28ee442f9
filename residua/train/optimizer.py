"""Muon for hidden matrices and AdamW for the rest, in one optimizer, both with cautious or plain weight decay.

Cautious weight decay (arXiv 2510.12402): x ← x − η(u + wd·1[u⊙x ≥ 0]⊙x), decay only where the update itself moves
the weight towards zero. Plain decay: x ← x − η(u + wd·x). Parameters are the fp32 masters; in bf16 storage a decay of
η·wd = 1e-3 would be rounded away.

Modules declare which matrices Muon updates: `hidden_matrices` maps the name of a module's own 2-D parameter to the row
counts of its independent parts. So the projections of a fused Q, K, V, G matrix are orthogonalised separately.
Modules also declare factors on the learning rate of single parameters (`RatedModule`), which form separate groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from residua.config.run import AdamW, Muon
from residua.model.projection import declared_matrices
from residua.model.rates import declared_factors
from residua.ops.optimizer_update import adam_directions, cautious_descent, momentum_directions, plain_descent
from residua.ops.symmetric_product import symmetric_product

Parts = tuple[int, ...]


def hidden_matrices(model: nn.Module) -> dict[str, Parts]:
    """The declared matrices of a model by parameter name, each with the row counts of its parts."""
    declared: dict[str, Parts] = {}
    for prefix, module in model.named_modules():
        for name, rows in declared_matrices(module).items():
            full = f"{prefix}.{name}" if prefix else name
            shape = tuple(module.get_parameter(name).shape)
            assert len(shape) == 2 and sum(rows) == shape[0], f"{full} of shape {shape} declares parts {rows}"
            declared[full] = tuple(rows)
    return declared


def _plain(method: Callable[..., None]) -> Callable[..., None]:
    """A torch method without its decorator, which would import `torch._dynamo`: seconds of no use on a CPU."""
    undecorated: Callable[..., None] = getattr(method, "__wrapped__", method)
    return undecorated


class HybridOptimizer(torch.optim.Optimizer):
    """One optimizer whose groups each follow a rule, `muon` or `adamw`.

    Every group has `names`, so that its state can be saved by parameter name, and a `peak_lr`; `set_rate` sets the
    fraction of it for the next step.
    """

    add_param_group = _plain(torch.optim.Optimizer.add_param_group)
    zero_grad = _plain(torch.optim.Optimizer.zero_grad)

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__([group for group in groups if group["params"]], {})
        self.set_rate(1.0)

    def set_rate(self, factor: float) -> None:
        for group in self.param_groups:
            group["lr"] = group["peak_lr"] * factor

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        A `closure`, which other trainers pass, computes the gradients first; its loss is returned, as in torch's own
        optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update(self.advance())
        return loss

    def advance(self) -> list[Numbers]:
        """Count a step; returns the numbers of its update that change from step to step, for each group."""
        numbers: list[Numbers] = []
        for group in self.param_groups:
            used = any(p.grad is not None for p in group["params"])
            group["steps"] += used
            numbers.append(_RULES[group["rule"]].numbers(group) if used else ())
        return numbers

    @torch.no_grad()
    def update(self, numbers: Sequence[Numbers]) -> None:
        """Update every parameter that has a gradient, with the numbers that `advance` returned or tensors of them."""
        for group, its_numbers in zip(self.param_groups, numbers, strict=True):
            with_gradient = [i for i, p in enumerate(group["params"]) if p.grad is not None]
            if with_gradient:
                _RULES[group["rule"]].update(self, group, with_gradient, *its_numbers)

    def here(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The part of each tensor on this process; in this class, all of it."""
        return list(tensors)

    def orthogonalise(
        self, parameters: Sequence[Tensor], directions: Sequence[Tensor], parts: Sequence[Parts]
    ) -> Iterator[Updates]:
        """Updates for this process's rows of each matrix, from the same rows of its direction."""
        return orthogonal_updates(directions, parts)

    def state_size(self) -> int:
        """Elements of the whole state; allocates nothing."""
        return sum(len(_STATE[group["rule"]]) * p.numel() for group in self.param_groups for p in group["params"])

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name: `PARAMETER/momentum`, … and the step count of each group."""
        saved = {}
        for group in self.param_groups:
            saved[f"{group['rule']}-{group['title']}/steps"] = torch.tensor(group["steps"])
            for name, parameter in zip(group["names"], group["params"], strict=True):
                saved |= {f"{name}/{key}": value for key, value in _state(self.state, group, parameter).items()}
        return saved

    def load_tensors(self, saved: dict[str, Tensor]) -> None:
        """Restore a state that `tensors` returned; the caller has checked its names and shapes."""
        for name, current in self.tensors().items():
            if not name.endswith("/steps"):
                current.copy_(saved[name])
        self.set_steps(saved)

    def set_steps(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the step counts of a state that `tensors` returned."""
        for group in self.param_groups:
            group["steps"] = int(saved[f"{group['rule']}-{group['title']}/steps"])


def build_optimizer(
    model: nn.Module, config: Muon | AdamW, kind: Callable[[list[dict[str, Any]]], HybridOptimizer] = HybridOptimizer
) -> HybridOptimizer:
    """The optimizer that a configuration describes, with groups as the model's modules declare them."""
    declared = hidden_matrices(model)
    named = dict(model.named_parameters())
    matrices = {name: parameter for name, parameter in named.items() if name in declared}
    rest = {name: parameter for name, parameter in named.items() if name not in declared}
    if isinstance(config, AdamW):
        plain = config.model_copy(update={"weight_decay": 0.0})
        groups = [_group("matrices", matrices, config), _group("rest", rest, plain)]
    else:
        groups = [_group("matrices", matrices, config) | {"parts": [declared[name] for name in matrices]}]
        if config.embedding_decay is not None:
            modules = model.named_modules()
            tables = {f"{prefix}.weight".lstrip(".") for prefix, module in modules if isinstance(module, nn.Embedding)}
            embedding = {name: rest.pop(name) for name in list(rest) if name in tables}
            decayed = config.rest.model_copy(update={"weight_decay": config.embedding_decay, "decay": config.decay})
            groups.append(_group("embedding", embedding, decayed))
        groups.append(_group("rest", rest, config.rest))
    factors = declared_factors(model)
    return kind([part for group in groups for part in _by_factor(group, factors)])


def _group(title: str, parameters: dict[str, nn.Parameter], config: Muon | AdamW) -> dict[str, Any]:
    group = {"title": title, "params": list(parameters.values()), "names": list(parameters), "steps": 0}
    group |= {"peak_lr": config.lr, "weight_decay": config.weight_decay, "decay": config.decay}
    if isinstance(config, Muon):
        return group | {"rule": "muon", "momentum": config.momentum}
    return group | {"rule": "adamw", "betas": config.betas, "eps": config.eps}


PER_PARAMETER = ("params", "names", "parts")
"""Entries of a group that are lists with one item per parameter."""


def _by_factor(group: dict[str, Any], factors: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Split a group by learning-rate factor, with the parameters without a factor first."""
    of_each = [factors.get(name, 1.0) for name in group["names"]]
    for factor in (1.0, *sorted(set(of_each) - {1.0})):
        chosen = [i for i, of_one in enumerate(of_each) if of_one == factor]
        lists = {key: [group[key][i] for i in chosen] for key in PER_PARAMETER if key in group}
        title = group["title"] if factor == 1 else f"{group['title']} x{factor:g}"
        yield group | lists | {"title": title, "peak_lr": group["peak_lr"] * factor}


Numbers = Sequence[Any]
"""Floats, or float64 tensors on the device, from which a CUDA graph reads them."""


class _Rule(NamedTuple):
    numbers: Callable[[dict[str, Any]], tuple[float, ...]]
    """Learning rates, and corrections of means over few steps: they change from step to step."""
    update: Callable[..., None]


_STATE = {"muon": ("momentum",), "adamw": ("mean", "square")}


def _state(state: Any, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
    """A parameter's state, zeros at first."""
    if parameter not in state:
        state[parameter] = {key: torch.zeros_like(parameter) for key in _STATE[group["rule"]]}
    return cast("dict[str, Tensor]", state[parameter])


def _muon_numbers(group: dict[str, Any]) -> tuple[float, ...]:
    return group["lr"], group["lr"] * group["weight_decay"]


def _muon(optimizer: HybridOptimizer, group: dict[str, Any], chosen: list[int], rate: Any, decay: Any) -> None:
    """m ← βm + (1−β)g; u = polar(βm + (1−β)g), each part separately; step η·max(1, rows/columns)^½ (Nesterov)."""
    parameters = [group["params"][i] for i in chosen]
    weights, gradients = optimizer.here(parameters), optimizer.here([p.grad for p in parameters])
    momenta = optimizer.here([_state(optimizer.state, group, p)["momentum"] for p in parameters])
    directions = momentum_directions(momenta, gradients, group["momentum"], working_dtype(weights[0]))
    parts = [group["parts"][i] for i in chosen]
    for rows, updates, scale in optimizer.orthogonalise(parameters, directions, parts):
        moved = [weights[i][start:stop] for i, start, stop in rows]
        _DESCENTS[group["decay"]](moved, updates, rate * scale, decay)


class Rows(NamedTuple):
    """Some rows of one of a list of matrices."""

    matrix: int
    start: int
    stop: int


Updates = tuple[list[Rows], list[Tensor], float]
"""Rows, their updates, and their common factor on the learning rate."""


def orthogonal_updates(directions: Sequence[Tensor], parts: Sequence[Parts]) -> Iterator[Updates]:
    """Orthogonalise every part of every matrix; parts of the same shape form one batch."""
    by_shape: dict[tuple[int, int], list[Rows]] = {}
    for i, (direction, counts) in enumerate(zip(directions, parts, strict=True)):
        for stop, count in zip(accumulate(counts), counts, strict=True):
            by_shape.setdefault((count, direction.shape[1]), []).append(Rows(i, stop - count, stop))
    for shape, rows in by_shape.items():
        updates = _orthogonal([directions[i][start:stop] for i, start, stop in rows])
        yield rows, updates, max(1.0, shape[0] / shape[1]) ** 0.5


def _orthogonal(directions: list[Tensor]) -> list[Tensor]:
    """Orthogonalise matrices of the same shape in one batch."""
    first = directions[0]
    stack = first.new_empty((len(directions), *first.shape), dtype=working_dtype(first))
    torch._foreach_copy_(list(stack.unbind()), directions)
    return list(polar_express(stack).to(first.dtype).unbind())


def _adamw_numbers(group: dict[str, Any]) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    # Bias corrections are scalars: folded into eps and the rate, they save two passes over the weights.
    correction1, correction2 = 1 - beta1 ** group["steps"], (1 - beta2 ** group["steps"]) ** 0.5
    rate = group["lr"] * correction2 / correction1
    return group["eps"] * correction2, rate, group["lr"] * group["weight_decay"]


def _adamw(
    optimizer: HybridOptimizer, group: dict[str, Any], chosen: list[int], eps: Any, rate: Any, decay: Any
) -> None:
    """m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², u = (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps)."""
    parameters = [group["params"][i] for i in chosen]
    states = [_state(optimizer.state, group, p) for p in parameters]
    gradients = optimizer.here([p.grad for p in parameters])
    means = optimizer.here([state["mean"] for state in states])
    squares = optimizer.here([state["square"] for state in states])
    updates = adam_directions(means, squares, gradients, group["betas"], eps)
    _DESCENTS[group["decay"]](optimizer.here(parameters), updates, rate, decay)


_RULES = {"muon": _Rule(_muon_numbers, _muon), "adamw": _Rule(_adamw_numbers, _adamw)}
_DESCENTS = {"cautious": cautious_descent, "plain": plain_descent}


COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02
EPS = 1e-6


def working_dtype(parameter: Tensor) -> torch.dtype:
    """bf16 on a GPU, where matrix products in it are fast and precise enough for a direction; else the parameter's."""
    return torch.bfloat16 if parameter.is_cuda and parameter.dtype != torch.float64 else parameter.dtype


def polar_express(gradients: Tensor) -> Tensor:
    """Polar Express: the nearest semi-orthogonal matrix, by five matrix polynomials (Amsel et al., arXiv 2505.16932).

    For G = UΣVᵀ it returns about UVᵀ: X = G / (1.02‖G‖_F + 1e-6), then five times A = XXᵀ, X ← (aI + bA + cA²)X. Each
    step maps every singular value s to as + bs³ + cs⁵; the coefficients are the minimax-optimal sequence for singular
    values between 1e-3 and 1 of the norm, which all end within 1 ± 0.1412. The 1.02 is a margin for rounding in bf16.
    A and aI + bA + cA² = aI + bA + cAAᵀ are symmetric: on a GPU only half of each is computed.

    Takes a stack of matrices [..., rows, columns] and orthogonalises each separately in the stack's dtype. A tall
    matrix is multiplied from the right, X ← X(aI + bA + cA²) with A = XᵀX, which equals transposing it before and after
    but saves two copies.
    """
    tall = gradients.size(-2) > gradients.size(-1)
    x = gradients.reshape(-1, *gradients.shape[-2:])
    norm = torch.linalg.matrix_norm(x, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x * (1 / (MARGIN * norm + EPS)).to(x.dtype)
    for a, b, c in COEFFICIENTS:
        gram = symmetric_product(x.mT if tall else x)
        polynomial = symmetric_product(gram, gram, alpha=c, beta=b, gamma=a)
        x = torch.bmm(x, polynomial) if tall else torch.bmm(polynomial, x)
    return x.reshape(gradients.shape)
