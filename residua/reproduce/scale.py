"""`--scale s`: parameters and training tokens are both multiplied by s, so compute falls by s².

The depth stays as published: the papers are about depth, and some rows need it (eight streams fill seven sublayers).
Parameters outside the embedding grow with the square of the width, so the model and feed-forward widths are multiplied
by √s. The batch and the number of steps are each multiplied by √s, and warm-up scales with the steps. Context, learning
rates, norms and every other key stay as published; the vocabulary is that of the text.
"""

from __future__ import annotations

import math
from fractions import Fraction

from residua.config.model import ModelConfig, head_dim
from residua.config.run import RunConfig
from residua.config.settings import ConfigError

MIN_WIDTH = 32  # channels
MAX_BATCH_GROWTH = 4  # a narrower model may use micro-batches up to this many times larger


def parse_scale(text: str) -> Fraction:
    """`1/32`, `0.25` or `1` as a number above 0, at most 1."""
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale {text} is not a number above 0 and at most 1: write it as 1/32 or 0.25.")
    return scale


def changes(config: RunConfig, scale: Fraction, tokens: float | None = None) -> list[str]:
    """The overrides that scale a run. `tokens` is the published number, by default the run's own."""
    published = float(tokens or config.tokens)
    if scale == 1:
        steps = max(2, round(published / config.tokens_per_step))
        short = steps <= config.train.schedule.warmup  # the entry only times a few steps
        return [*([f"train.schedule.warmup={steps - 1}"] if short else []), f"train.steps={steps}"]
    root = math.sqrt(scale)
    narrow = _narrow(config.model, root)
    narrower = config.model.width / config.model.override(narrow).width
    batch = max(1, round(config.train.micro_batch * config.train.accumulate * root))
    limit = max(1, int(config.train.micro_batch * min(MAX_BATCH_GROWTH, narrower)))
    accumulate = -(-batch // limit)
    micro = max(1, round(batch / accumulate))
    steps = max(2, round(published * scale / (micro * accumulate * config.sequence)))
    return [
        *(f"model.{change}" for change in narrow),
        f"train.micro_batch={micro}",
        f"train.accumulate={accumulate}",
        f"train.schedule.warmup={min(max(1, round(config.train.schedule.warmup * root)), steps - 1)}",
        f"train.steps={steps}",
        f"train.log_every={max(1, min(config.train.log_every, steps // 100))}",
        f"train.validate_every={max(1, steps // 20)}",
        f"train.save_every={max(1, steps // 4)}",
    ]


def _narrow(model: ModelConfig, root: float) -> list[str]:
    width = max(MIN_WIDTH, MIN_WIDTH * round(model.width * root / MIN_WIDTH))
    share = width / model.width
    return [
        f"width={width}",
        f"ffn.hidden={max(8, 8 * round(model.ffn.hidden * share / 8))}",
        *_narrow_softmax(model, share),
        *_narrow_linear(model, share),
    ]


def _narrow_softmax(model: ModelConfig, share: float) -> list[str]:
    """Fewer and narrower heads, keeping the number of queries per key and value if it divides."""
    softmax, table = model.softmax, model.attention.softmax_path
    if softmax is None:
        return _narrow_latent(model, share)
    heads, dim = _heads(softmax.heads * head_dim(model), head_dim(model), share)
    changes = [f"{table}.heads={heads}", f"{table}.head_dim={dim}"]
    if softmax.kv_heads is not None:
        shared = max(1, heads * softmax.kv_heads // softmax.heads)
        changes.append(f"{table}.kv_heads={math.gcd(heads, shared)}")
    return changes


def _narrow_latent(model: ModelConfig, share: float) -> list[str]:
    latent, table = model.latent, model.attention.softmax_path
    if latent is None:
        return []
    heads, dim = _heads(latent.heads * latent.head_dim, latent.head_dim, share)
    rank = max(8, 8 * round(latent.rank * share / 8))
    return [f"{table}.heads={heads}", f"{table}.head_dim={dim}", f"{table}.rank={rank}"]


def _narrow_linear(model: ModelConfig, share: float) -> list[str]:
    linear = model.linear
    if linear is None:
        return []
    table = "attention.linear" if model.softmax_layers else "attention"
    values, dim = _heads(linear.value_heads * linear.head_dim, linear.head_dim, share)
    if "value_heads" not in type(linear).model_fields:
        return [f"{table}.heads={values}", f"{table}.head_dim={dim}"]
    keys = math.gcd(values, max(1, values * linear.key_heads // linear.value_heads))
    return [f"{table}.value_heads={values}", f"{table}.key_heads={keys}", f"{table}.head_dim={dim}"]


def _heads(width: int, dim: int, share: float) -> tuple[int, int]:
    """Heads and their width: the largest power of two that divides the narrowed width and leaves two heads."""
    narrowed = max(MIN_WIDTH, MIN_WIDTH * round(width * share / MIN_WIDTH))
    dim = min(dim, narrowed // 2)
    while narrowed % dim or dim & (dim - 1):
        dim -= 1
    return narrowed // dim, dim


def sentence(scale: Fraction) -> str:
    """A sentence on the effect of the scale, for the page and the terminal."""
    if scale == 1:
        return "The paper's size: parameters and tokens as published."
    return (
        f"Scale {scale}: about {float(scale):.3g} of the paper's parameters outside the embedding (with a "
        f"width of at least {MIN_WIDTH}) and of its tokens; compute falls with the square. Depth, context and "
        "learning rates are as in the paper."
    )
