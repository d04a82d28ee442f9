"""A Hugging Face model observed without Residua: hooks on its layers while it runs with eager attention."""

import re
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from residua.diagnose.text import Sample

SINK, FLOORS = 0.3, 3.0
STEPS, RATE, ENOUGH = 20, 0.1, 0.8


class Eager:
    """One pass: the loss; by layer, its input and output, its attention maps and the chosen experts."""

    def __init__(self, model: Any, sample: Sample, suspect: str | None = None) -> None:
        self.tokens, self.width = sample.tokens, int(model.config.get_text_config(decoder=True).hidden_size)
        self.chosen = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None)
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.maps: dict[int, list[Tensor]] = {}
        self.choices: dict[int, Tensor] = {}
        self.sizes: dict[int, tuple[Tensor, Tensor]] = {}
        self.silent = self.zero = False
        use_eager(model)
        handles = self._attach(model)
        if suspect is not None:
            handles.append(model.get_submodule(suspect).register_forward_hook(self._suspect, with_kwargs=True))
        with torch.no_grad():
            logits = model(input_ids=sample.tokens, use_cache=False).logits
        for handle in handles:
            handle.remove()
        self.loss = float(cross_entropy(logits.flatten(0, 1).float(), sample.targets.flatten()))

    def _attach(self, model: Any) -> list[Any]:
        handles: list[Any] = []
        names = layer_names(model)
        for n, name in enumerate(names):
            layer = model.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(lambda m, a, k, n=n: self._enter(n, a, k), with_kwargs=True))
            handles.append(layer.register_forward_hook(lambda m, a, y, n=n: self._leave(n, y)))
            for part_name, part in layer.named_modules():
                handles.append(part.register_forward_hook(lambda m, a, y, n=n, p=part_name: self._part(n, p, y)))
        return handles

    def _wide(self, x: Any) -> bool:
        return isinstance(x, Tensor) and tuple(x.shape) == (*self.tokens.shape, self.width)

    def _enter(self, n: int, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.maps.pop(n, None)
        for x in (*given, *named.values()):
            if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[-1] % self.width == 0:
                streams = x.unflatten(-1, (-1, self.width)) if x.shape[-1] > self.width else x
                self.sizes[n] = self._sizes(streams.abs())
                if self._wide(x):
                    self.inputs[n] = x.clone()
                return

    def _suspect(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """A part is silent if it returns zeros, or exactly the state it should add to."""
        y = output[0] if isinstance(output, tuple) else output
        self.zero = not y.any()
        self.silent = self.zero or any(
            isinstance(x, Tensor) and x.shape == y.shape and torch.allclose(x, y) for x in (*given, *named.values())
        )

    def _sizes(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of |x| by dimension, and the share of tokens in which it exceeds eight medians; by stream."""
        if size.dim() == 4:
            size = size.flatten(0, 1).transpose(0, 1) if size.shape[:2] == self.tokens.shape else size.flatten(1, 2)
        else:
            size = size.flatten(0, 1)
        far = size > 8 * size.median(-1, keepdim=True).values
        return size.mean(-2), far.double().mean(-2)

    def _leave(self, n: int, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if self._wide(y):
            self.outputs[n] = y.clone()
            self.sizes[n + 1] = self._sizes(y.abs())
            if self.zero and not y.any():  # the part ends its layer and norms, so zeros do not mean that it is silent
                self.silent = False

    def _part(self, n: int, name: str, output: Any) -> None:
        for y in output if isinstance(output, tuple) else ():
            if is_map(y, self.tokens) and not any(y is known for known in self.maps.get(n, [])):
                self.maps.setdefault(n, []).append(y)
            if re.search(r"gate|router", name) and is_choice(y, self.tokens):
                self.choices[n] = y
            if name.endswith("feed_forward.router") and self.chosen and is_scores(y, self.chosen):  # Llama 4
                self.choices[n] = y.topk(self.chosen, -1).indices

    def load(self, n: int, experts: int) -> Tensor:
        """The share of the choices that each expert of a layer got; NaN where no router reports it."""
        if n not in self.choices:
            return torch.full((experts,), float("nan"), dtype=torch.float64)
        counts = torch.bincount(self.choices[n].flatten(), minlength=experts)[:experts].double()
        return counts / counts.sum()

    def outlier(self, dimension: int) -> set[str]:
        """A dimension that is far above the rest in the layers' inputs; with streams, in one of them."""
        if not self.sizes:
            return set()
        sizes, shares = (torch.stack([pair[n] for pair in self.sizes.values()]).mean(0) for n in (0, 1))
        far = (sizes[..., dimension] > 8 * sizes.median(-1).values) & (shares[..., dimension] > 0.5)
        return {f"residual_sink {{'dimension': {dimension}}}"} if bool(far.any()) else set()

    def sinks(self) -> set[str]:
        """The first token as a sink, with the layers in which a head gives it 0.3 and three times the uniform share."""
        layers = []
        for n, maps in sorted(self.maps.items()):
            weights = torch.cat(maps, 1).double()
            seen = (weights > 0).any(1)
            floor = float(
                (seen[..., 0] / seen.sum(-1).clamp(min=1)).sum(-1).mean() / seen[..., 0].sum(-1).double().mean()
            )
            alpha = weights[..., 0].sum(-1).mean(0) / seen[..., 0].sum(-1).double().mean()
            if bool(((alpha > SINK) & (alpha > FLOORS * floor)).any()):
                layers.append(n)
        return {f"attention_sink {{'position': 0, 'layers': {layers}}}"} if layers else set()


def is_map(y: Any, tokens: Tensor) -> bool:
    """Whether a tensor holds attention weights [B, H, T, T]."""
    batch, length = tokens.shape
    if not (isinstance(y, Tensor) and y.dim() == 4 and y.is_floating_point()):
        return False
    if y.shape[0] != batch or y.shape[2] != length or y.shape[3] != length:
        return False
    return bool((y >= 0).all() and (y.sum(-1) <= 1 + 1e-4).all())


def is_choice(y: Any, tokens: Tensor) -> bool:
    """Whether a tensor has the numbers of k chosen experts for every token."""
    if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.dim() < 2:
        return False
    return y.numel() == tokens.numel() * y.shape[-1]


def is_scores(y: Any, chosen: int) -> bool:
    """Whether a tensor holds a score of every expert, of which there are more than are chosen."""
    return isinstance(y, Tensor) and y.is_floating_point() and y.shape[-1] > chosen


def use_eager(model: Any) -> None:
    with suppress(ValueError, KeyError, AttributeError, NotImplementedError):
        model.set_attn_implementation("eager")


def layer_names(model: Any) -> list[str]:
    """The names of the decoder layers.

    Of the numbered rows of modules: first those of a class that is never split, then the longest, then the outermost.
    """
    kept = set(model._no_split_modules or ())
    rows = {
        name: [f"{name}.{n}" for n in range(len(module))]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not re.search(r"vision|visual|audio|speech", name)
    }

    def rank(name: str) -> tuple[bool, int, int]:
        row = model.get_submodule(name)
        return any(type(member).__name__ in kept for member in row), len(row), -name.count(".")

    return rows[max(rows, key=rank)] if rows else []


def plant_sink(model: Any, sample: Sample) -> None:
    """Change the attention of the last layer that has maps until its heads look at the first token."""
    use_eager(model)
    layer = next((n for n in sorted(Eager(model, sample).maps, reverse=True)), None)
    if layer is None:
        return
    maps: list[Tensor] = []
    module = model.get_submodule(layer_names(model)[layer])

    def keep(part: nn.Module, given: Any, output: Any) -> None:
        maps.extend(y for y in (output if isinstance(output, tuple) else ()) if is_map(y, sample.tokens))

    handles = [part.register_forward_hook(keep) for part in module.modules()]
    other = re.compile(r"mlp|moe|expert|ffn|feed|gate")
    sources = [p for name, p in module.named_parameters() if p.dim() >= 2 and not other.search(name)]
    optimizer = torch.optim.Adam(sources, RATE)
    for _ in range(STEPS):
        maps.clear()
        with torch.enable_grad():
            model(input_ids=sample.tokens, use_cache=False)
            mass = torch.stack([m[..., 0].sum() / (m[..., 0] > 0).sum().clamp(min=1) for m in maps]).mean()
            if float(mass.detach()) > ENOUGH or not mass.requires_grad:
                break
            optimizer.zero_grad()
            (-mass.log()).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
