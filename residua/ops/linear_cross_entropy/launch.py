"""The head's projection and the cross-entropy without float32 logits in memory.

Let p = softmax(logits), g and g_z the gradients of the loss and the z-term, and count the number of targets that count.
The gradient of a token's logits is  c·p − (g/count)·onehot(target),  c = (g + 2·z_loss·lse·g_z)/count.

If g = g_z, as when minimising loss + z, then c = g·w/count with w = 1 + 2·z_loss·lse, and the forward pass knows all of
it except g. So it multiplies p by both matrices, for some tokens at a time. It stores p·W [N, C] and pᵀ·(w·hidden)
[V, C] instead of p [N, V], with 1/w subtracted from the target's entry of p. The backward pass scales them.

The host can tell that g and g_z are equal without reading their values from the GPU: they are one tensor, or z_loss is
0. If they differ, the backward pass of `linear_cross_entropy` recomputes p, for some tokens at a time: c scales rows of
the products' other operands, and the target's entry is p_target − g/(count·c). `training_cross_entropy` assumes that
they are equal and stores nothing for the other case.

None of these supports a softcap: only the reference caps logits (`_serves`). `fp8.py` multiplies with the head's matrix
in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.launch import device_guard, either, next_power_of_2
from residua.ops._runtime.library import differentiate, launcher
from residua.ops._runtime.numeric import wide
from residua.ops._runtime.triton_support import INTERPRETED, supports
from residua.ops.low_precision.fp8 import E5M2, E5M2_MAX, Codes, encode
from residua.ops.low_precision.product import on_hardware, simulated

CHUNK_BYTES = 512 * 2**20
TRAINED_BYTES = 768 * 2**20
BESIDE_BYTES = 960 * 2**20
LEAST_BYTES = 256 * 2**20
# Replaces a coefficient of exactly 0, by which the target's entry would otherwise be divided.
TINY = 1e-20
PIECE_BYTES = 2**30
LANES, ROWS, WARPS = 4096, 4, 16
P_SCALE = 2.0**-15
"""The scale of probabilities in E5M2 (`fp8.py`): 1 is encoded as 32,768."""
TILE = 256


@launcher("linear_cross_entropy_value", ahead=False)
def value(
    hidden: Tensor, cast: Tensor, targets: Tensor, z_loss: float, ignore_index: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """loss and z, when no gradient is needed; `cast` is the head's matrix in hidden's dtype."""
    yield _single(hidden), _single(hidden)
    chunks = _softmaxes(hidden, cast, targets, ignore_index, CHUNK_BYTES, write=False)
    lse, nll = (torch.cat(part) for part in zip(*((lse, nll) for _, _, lse, nll in chunks), strict=True))
    yield _losses(lse, nll, targets != ignore_index, z_loss)


@launcher("linear_cross_entropy_backward", ahead=False)
def backward(
    g_loss: Tensor,
    g_z: Tensor,
    hidden: Tensor,
    cast: Tensor,
    targets: Tensor,
    z_loss: float,
    ignore_index: int,
    weight_dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of hidden [N, C] and of weight [V, C], from recomputed probabilities."""
    g_hidden, g_weight = torch.empty_like(hidden), torch.empty_like(cast, dtype=weight_dtype)
    yield g_hidden, g_weight
    counted = (targets != ignore_index)[:, None]
    target = torch.where(counted, targets[:, None], 0)
    count = counted.sum().clamp(min=1)
    share = g_loss / count
    single = wide(cast[:0]).dtype
    total = g_weight if weight_dtype is single else torch.empty_like(cast, dtype=single)
    for rows, p, lse, nll in _softmaxes(hidden, cast, targets, ignore_index, CHUNK_BYTES, write=True):
        scale = share + 2 * z_loss * g_z * lse[:, None] / count
        scale = torch.where(scale == 0, TINY, scale)
        entry = torch.exp(-nll[:, None]) - share / scale
        scale = torch.where(counted[rows], scale, 0)
        _multiply(p, target[rows], entry, hidden[rows], scale, cast, g_hidden[rows], total, first=rows.start == 0)
        g_hidden[rows].mul_(scale)
        del p  # before the next is made
    if total is not g_weight:
        g_weight.copy_(total)


def trained(
    hidden: Tensor, weight: Tensor, cast: Tensor, targets: Tensor, z_loss: float, ignore_index: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """loss, z, lse [N], p·W [N, C] and pᵀ·(w·hidden) [V, C] in float32, with 1/w subtracted from p_target; w is from
    `coefficients`.

    `weight` is an argument for its gradient; `cast` is the same matrix in hidden's dtype.
    """
    lse_of_all = _single(hidden, len(hidden))
    p_weight, p_hidden = torch.empty_like(hidden), torch.empty_like(cast, dtype=lse_of_all.dtype)
    yield _single(hidden), _single(hidden), lse_of_all, p_weight, p_hidden
    counted = targets != ignore_index
    target, parts = torch.where(counted, targets, 0)[:, None], []
    for rows, p, lse, nll in _softmaxes(hidden, cast, targets, ignore_index, room(cast.nbytes), write=True):
        scale = coefficients(lse, counted[rows], z_loss)[:, None]
        entry = torch.exp(-nll[:, None]) - 1 / torch.where(scale == 0, 1, scale)
        _multiply(p, target[rows], entry, hidden[rows], scale, cast, p_weight[rows], p_hidden, first=rows.start == 0)
        parts.append((lse, nll))
        del p  # before the next is made
    lse, nll = (torch.cat(part) for part in zip(*parts, strict=True))
    yield *_losses(lse, nll, counted, z_loss), lse, p_weight, p_hidden


forward = launcher("linear_cross_entropy", ahead=False)(trained)
training_forward = launcher("training_cross_entropy", ahead=False)(trained)


@launcher("fp8_cross_entropy", ahead=False)
def fp8_forward(
    hidden: Tensor, weight: Tensor, low: Tensor, scale_x: Tensor, codes: Tensor, turned: Tensor, scale: Tensor,
    targets: Tensor, z_loss: float, ignore_index: int, trains: bool, hardware: bool,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """As `trained`, in FP8 (`fp8.py`); `low` are the codes of hidden.

    Unless it `trains`, the last two results are empty.
    """
    lse_of_all, width = _single(hidden, len(hidden)), hidden.shape[1]
    p_weight = hidden.new_empty(len(hidden) * trains, width)
    p_hidden = hidden.new_empty(len(codes) * trains, width, dtype=lse_of_all.dtype)
    yield _single(hidden), _single(hidden), lse_of_all, p_weight, p_hidden
    multiply = on_hardware if hardware else simulated
    counted = targets != ignore_index
    target, parts = torch.where(counted, targets, 0)[:, None], []
    most = room(2 * codes.nbytes) // (hidden.element_size() + 1)  # a probability and its code
    for rows in _chunks(len(hidden), codes, most):
        p = multiply(Codes(low[rows], scale_x), Codes(codes, scale), hidden.dtype)
        low_p = torch.empty_like(p, dtype=E5M2) if trains else None
        lse, nll = _softmax_(p, targets[rows], ignore_index, trains, low_p)
        parts.append((lse, nll))
        if low_p is not None:
            w = coefficients(lse, counted[rows], z_loss)[:, None]
            entry = torch.exp(-nll[:, None]) - 1 / torch.where(w == 0, 1, w)
            others = multiply(Codes(low_p, scale.new_full((), P_SCALE)), Codes(turned, scale), hidden.dtype)
            target_rows = codes.view(torch.uint8)[target[rows, 0]].view(codes.dtype)  # rows of Q(W)
            p_weight[rows] = others + target_rows.to(entry.dtype) * (entry * scale)
            p.scatter_(1, target[rows], entry.to(p.dtype))
            _add_product(p_hidden, p.t(), (hidden[rows] * w).to(p.dtype), first=rows.start == 0)
        del p, low_p  # before the next are made
    lse, nll = (torch.cat(part) for part in zip(*parts, strict=True))
    yield *_losses(lse, nll, counted, z_loss), lse, p_weight, p_hidden


def _single(hidden: Tensor, *shape: int) -> Tensor:
    return hidden.new_empty(shape, dtype=torch.promote_types(hidden.dtype, torch.float32))


def _losses(lse: Tensor, nll: Tensor, counted: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    count = counted.sum().clamp(min=1)
    return nll.sum() / count, z_loss * lse.square().where(counted, 0).sum() / count


def _softmaxes(
    hidden: Tensor, cast: Tensor, targets: Tensor, ignore_index: int, most: int, *, write: bool
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """For `most` bytes of logits at a time: the rows, their logits or, with `write`, softmax, then lse and nll."""
    for rows in _chunks(hidden.shape[0], cast, most):
        p = torch.mm(hidden[rows], cast.t())
        yield rows, p, *_softmax_(p, targets[rows], ignore_index, write)
        del p  # before the next is made


def _multiply(
    p: Tensor, target: Tensor, entry: Tensor, hidden: Tensor, scale: Tensor, cast: Tensor,
    p_weight: Tensor, p_hidden: Tensor, *, first: bool,
) -> None:  # fmt: skip
    """p_weight ← p·W, and p_hidden ← pᵀ·(scale·hidden), accumulated unless `first`; p's target entry is `entry`."""
    p.scatter_(1, target, entry.to(p.dtype))
    torch.mm(p, cast, out=p_weight)
    _add_product(p_hidden, p.t(), (hidden * scale).to(p.dtype), first=first)


def room(copied: int) -> int:
    """The bytes of logits at a time: the part of BESIDE_BYTES not used by a copy of the matrix, of `copied` bytes.

    A matrix of that dtype is not copied, but its float32 gradient then takes as many extra bytes over the returned one.
    """
    return min(TRAINED_BYTES, max(LEAST_BYTES, BESIDE_BYTES - copied))


def coefficients(lse: Tensor, counted: Tensor, z_loss: float) -> Tensor:
    """w = 1 + 2·z_loss·lse per token, never exactly 0; but 0 if the token's target does not count."""
    scale = 1 + 2 * z_loss * lse
    return torch.where(counted, torch.where(scale == 0, TINY, scale), 0)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total ← a·b, or total + a·b unless `first`, accumulated in total's dtype."""
    if a.is_cuda and total.dtype != a.dtype:
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(torch.mm(a, b)) if total.dtype != a.dtype else torch.mm(a, b, out=total)
    else:
        total.add_(torch.mm(a, b))


def _chunks(tokens: int, cast: Tensor, most: int) -> list[slice]:
    """Equal runs of tokens whose logits take at most `most` bytes, if possible whole tiles; one run without tokens."""
    fits = max(1, most // (cast.shape[0] * cast.element_size()))
    size = -(-max(tokens, 1) // -(-max(tokens, 1) // fits))
    size = min(fits, -(-size // TILE) * TILE)
    return [slice(start, start + size) for start in range(0, max(tokens, 1), size)]


@launcher("head_piece", ahead=False)
def piece(
    hidden: Tensor, weight: Tensor, cast: Tensor, targets: Tensor, keep: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """lse [N] of some rows of a head, the target's logit [N] (0 if it is not among them), and the softmax [N, R].

    The softmax is over these rows only; without `keep` it is empty ([0, R]).
    """
    softmax = hidden.new_empty((hidden.shape[0] if keep else 0, cast.shape[0]))
    yield _single(hidden, len(hidden)), _single(hidden, len(hidden)), softmax
    inside = _inside(targets, cast)
    local = targets.where(inside, -1)
    if keep:
        lse, nll = _softmax_(torch.mm(hidden, cast.t(), out=softmax), local, -1, True)
    else:
        chunks = _softmaxes(hidden, cast, local, -1, CHUNK_BYTES, write=False)
        lse, nll = (torch.cat(part) for part in zip(*((lse, nll) for _, _, lse, nll in chunks), strict=True))
    yield lse, (lse - nll).where(inside, 0), softmax


@launcher("head_piece_backward", ahead=False)
def piece_backward(
    g_lse: Tensor,
    g_picked: Tensor,
    hidden: Tensor,
    cast: Tensor,
    targets: Tensor,
    lse: Tensor,
    picked: Tensor,
    softmax: Tensor,
    weight_dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of hidden [N, C] and the rows [R, C], given the logits' gradient g_lse·p + g_picked·onehot."""
    g_hidden, g_weight = torch.empty_like(hidden), torch.empty_like(cast, dtype=weight_dtype)
    yield g_hidden, g_weight
    inside = _inside(targets, cast)[:, None]
    local, target = targets.where(inside[:, 0], -1), targets[:, None].where(inside, 0)
    nonzero = torch.where(g_lse == 0, TINY, g_lse)[:, None]
    scale = nonzero.where((g_lse != 0)[:, None] | (g_picked != 0)[:, None], 0)
    entry = torch.exp(picked - lse)[:, None] + g_picked[:, None] / nonzero

    def multiply(p: Tensor, rows: slice, total: Tensor) -> None:
        """g_hidden of the rows = scale·(p·W), total = pᵀ·(scale·hidden), with `entry` as p of the target."""
        # p at the target; if a token's target is in other rows, the first entry is written back unchanged
        written = torch.where(inside[rows], entry[rows], p[:, :1]).to(p.dtype)
        # Through .data, which does not bump the version: each backward pass rewrites these entries before it uses them.
        p.data.scatter_(1, target[rows], written)
        torch.mm(p, cast, out=g_hidden[rows]).mul_(scale[rows])
        scaled = torch.mul(hidden[rows], scale[rows], out=torch.empty_like(hidden[rows]))
        _add_product(total, p.t(), scaled, first=True)

    if softmax.shape[0] == hidden.shape[0]:
        multiply(softmax, slice(None), g_weight)
        return
    part = torch.empty_like(g_weight.zero_())
    for rows, p, _, _ in _softmaxes(hidden, cast, local, -1, CHUNK_BYTES, write=True):
        multiply(p, rows, part)
        g_weight += part
        del p  # before the next is made


def _inside(targets: Tensor, cast: Tensor) -> Tensor:
    return (targets >= 0) & (targets < cast.shape[0])


def token_likelihoods(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The fused twin of the reference; its logits are in hidden's dtype and are read twice."""
    logits = torch.mm(hidden, weight.to(hidden.dtype).t())
    _, nll = softmax_(logits, targets, -1, False)
    return -nll, logits.argmax(-1) == targets


def _softmax_(
    logits: Tensor, targets: Tensor, ignore_index: int, write: bool, codes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    run = softmax_ if supports(logits) else plain_softmax_
    return run(logits, targets, ignore_index, write, codes)


def softmax_(
    logits: Tensor, targets: Tensor, ignore_index: int, write: bool, codes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """lse [N] and −log p(target) [N] (0 where ignored) in float32; with `write`, logits [N, V] become probabilities.

    Their E5M2 `codes` [N, V] under P_SCALE, 0 for the target, are written too, if given.
    """
    from residua.ops.linear_cross_entropy.kernels import softmax_kernel

    tokens, vocabulary = logits.shape
    lse = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    nll = torch.empty_like(lse)
    if tokens:
        with device_guard(logits):
            softmax_kernel[(tokens,)](
                logits, either(codes, logits), targets, lse, nll, vocabulary, logits.stride(0), ignore_index,
                WRITE=write, ROWS=ROWS, LANES=min(LANES, next_power_of_2(vocabulary)), num_warps=WARPS,
                ENCODE=0 if codes is None else int(1 / P_SCALE), STEPWISE=INTERPRETED,
            )  # fmt: skip
    return lse, nll


def plain_softmax_(
    logits: Tensor, targets: Tensor, ignore_index: int, write: bool, codes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`softmax_` in plain PyTorch: lse and −log p(target); with `write` the logits become probabilities."""
    values = wide(logits)
    lse = values.logsumexp(-1)
    counted = targets != ignore_index
    picked = values.gather(1, targets.where(counted, 0)[:, None]).squeeze(1)
    if write:
        logits.copy_(torch.exp(values - lse[:, None]))
    if codes is not None:
        others = logits.scatter(1, targets.where(counted, 0)[:, None], 0)
        codes.copy_(encode(others, lse.new_full((), P_SCALE), E5M2, E5M2_MAX).values)
    return lse, (lse - picked).where(counted, 0)


def _cross_entropy(
    operator: Callable[..., tuple[Tensor, ...]], hidden: Tensor, weight: Tensor, targets: Tensor, *,
    z_loss: float = 0.0, ignore_index: int = -100, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The fused twin of the reference; logits exist only in hidden's dtype (under autocast, in autocast's dtype).

    By `training_forward`, the loss carries the gradient of loss + z, and z carries none.
    """
    rows, cast, flat_targets, wanted = _prepared(hidden, weight, targets)
    if not wanted:
        loss, z = value(rows, cast, flat_targets, z_loss, ignore_index)
    else:
        loss, z, *_ = operator(rows, weight, cast, flat_targets, z_loss, ignore_index)
    return loss, z


linear_cross_entropy = partial(_cross_entropy, forward)
training_cross_entropy = partial(_cross_entropy, training_forward)


def head_piece(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """The fused twin of the reference; the backward pass recomputes a softmax of more than PIECE_BYTES."""
    rows, cast, flat_targets, wanted = _prepared(hidden, weight, targets)
    keep = wanted and rows.shape[0] * weight.shape[0] * rows.element_size() <= PIECE_BYTES
    lse, picked, _ = piece(rows, weight, cast, flat_targets, keep)
    return lse, picked


def _prepared(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Rows and the matrix in the dtype of the products, targets, and whether a gradient is needed."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return hidden.reshape(-1, hidden.shape[-1]), weight.detach().to(hidden.dtype), targets.reshape(-1), wanted


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], *, again: bool = True) -> None:
    """`again`: backward may have to recompute probabilities."""
    hidden, weight, _, targets, ctx.z_loss, ctx.ignore_index = inputs
    ctx.weight_dtype = weight.dtype
    ctx.save_for_backward(targets, *output[2:], *((hidden, weight) if again and ctx.z_loss else ()))
    ctx.set_materialize_grads(False)


def _save_fp8(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, *_, targets, z_loss, ignore_index, _, _ = inputs
    _save(ctx, (hidden, weight, None, targets, z_loss, ignore_index), output, again=False)


@differentiate(forward, _save)
def _differentiate(
    ctx: Any, g_loss: Tensor | None, g_z: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    _refuse_second(others)
    if g_loss is None and g_z is None:
        return ()
    targets, lse, p_weight, p_hidden, *again = ctx.saved_tensors
    g_loss, g_z = (lse.new_zeros(()) if g is None else g for g in (g_loss, g_z))
    if ctx.z_loss == 0 or g_loss is g_z:
        return _scaled(ctx, g_loss, targets, lse, p_weight, p_hidden)
    hidden, weight = again
    saved = (hidden, weight.to(hidden.dtype), targets, ctx.z_loss, ctx.ignore_index, ctx.weight_dtype)
    return backward(g_loss, g_z, *saved)


def _refuse_second(gradients: Sequence[Tensor | None]) -> None:
    """Refuse second derivatives: only they give the tensors stored for backward a gradient."""
    if any(g is not None for g in gradients):
        raise RuntimeError(
            "the fused cross-entropy has no second derivative: call it inside residua.ops.backend('reference')."
        )


@differentiate(fp8_forward, _save_fp8)
@differentiate(training_forward, partial(_save, again=False))
def _differentiate_trained(ctx: Any, g: Tensor | None, _: Tensor | None, *others: Tensor | None) -> tuple[Tensor, ...]:
    _refuse_second(others)
    return () if g is None else _scaled(ctx, g, *ctx.saved_tensors)


def _scaled(
    ctx: Any, g: Tensor, targets: Tensor, lse: Tensor, p_weight: Tensor, p_hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden and of weight if both losses have the gradient g."""
    counted = targets != ctx.ignore_index
    share = g / counted.sum().clamp(min=1)
    scale = coefficients(lse, counted, ctx.z_loss) * share
    # in the products' dtype, so that compiled code reads and writes half the bytes
    g_hidden = (p_weight * scale[:, None]).to(p_weight.dtype)
    return g_hidden, (p_hidden * share).to(ctx.weight_dtype)


def _save_piece(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, cast, targets, _ = inputs
    ctx.weight_dtype = weight.dtype
    ctx.save_for_backward(hidden, cast, targets, *output)


@differentiate(piece, _save_piece)
def _differentiate_piece(ctx: Any, g_lse: Tensor, g_picked: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return piece_backward(g_lse, g_picked, *ctx.saved_tensors, ctx.weight_dtype)
