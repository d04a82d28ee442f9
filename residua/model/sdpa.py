"""Causal attention over [B, T, H, D], within documents and windows, with or without a sink.

Plain causal attention uses torch's scaled_dot_product_attention. With documents, windows, sinks or capped scores,
compiled code on CUDA uses flex attention, which skips masked blocks and returns the log-sum-exp that a sink needs.
Elsewhere dense PyTorch is used: flex attention that is not compiled would store all scores.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from residua.ops._runtime.numeric import soft_cap, wide
from residua.ops.inference import decode_attention

if TYPE_CHECKING:
    from residua.model.cache import Now


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Tensor | None = None,
    sink: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """softmax(QKᵀ/√D) V over earlier positions, of the same document if `segments` [B, T] is given.

    q [B, T, H, D]; k, v [B, T, H_kv, D] with H a multiple of H_kv. `sink` [H] adds exp(sink) to each head's softmax
    denominator. With `window` a query sees itself and the window − 1 positions before it. With `softcap` c, a score s
    becomes c·tanh(s/c). `positions` [T] are the queries' indices among the keys, if there are fewer queries than keys;
    `segments` has one entry per key. Returns [B, T, H, D].
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k.to(q.dtype), v.to(q.dtype)))
    grouped = q.shape[1] != k.shape[1]
    if segments is None and sink is None and window is None and softcap is None and positions is None:
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    elif q.is_cuda and (sink is not None or torch.compiler.is_compiling()):
        y = _flex(q, k, v, segments, sink, window, softcap, grouped, positions)
    else:
        y = _dense(q, k, v, _visible(k, segments, window, positions), sink, softcap)
    return y.transpose(1, 2)


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, now: Now, *, sink: Tensor | None = None, window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend from q [B, T, H, D], which follow the cached tokens, to slots k, v [B, S, H_kv, D] visible from `now`."""
    if now.visible is None:
        if now.until is None:
            return attend(q, k, v, sink=sink, window=window, softcap=softcap)
        if window is None and softcap is None:
            return decode_attention(q[:, 0], k, v, now.until, sink)[:, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k.to(q.dtype), v.to(q.dtype)))
    return _dense(q, k, v, _seen(now, window, k.shape[2]), sink, softcap).transpose(1, 2)


def attend_latents(q: Tensor, turned: Tensor, c: Tensor, shared: Tensor, now: Now, *, scale: float) -> Tensor:
    """softmax(scale · (q cᵀ + turned sharedᵀ)) c for one token per row: latent attention in its absorbed form.

    q [B, H, R] and turned [B, H, S_d] attend to the cached latents c [B, S, R] and shared parts [B, S, S_d] visible
    from `now`. Returns [B, H, R].
    """
    c, shared = c.to(q.dtype), shared.to(q.dtype)
    scores = (q @ c.mT + turned @ shared.mT) * scale
    scores = wide(scores).masked_fill(~_seen(now, None, c.shape[1])[:, 0], float("-inf"))
    return scores.softmax(-1).to(c.dtype) @ c


def _seen(now: Now, window: int | None, slots: int) -> Tensor:
    """[B, 1, T, slots], True where a query may look.

    A row's slots are in token order. If some are padding, the window counts visible slots only.
    """
    if now.visible is None:
        assert now.until is not None
        visible = torch.arange(slots, device=now.until.device) <= now.until[:, None, None, None]
    else:
        visible = now.visible
    if window is None:
        return visible
    later = visible.flip(-1).cumsum(-1).flip(-1)
    return visible & (later <= window)


def _visible(k: Tensor, segments: Tensor | None, window: int | None, positions: Tensor | None) -> Tensor:
    """[T, S] or [B, 1, T, S], True where a query may look; without positions, every key has a query."""
    length = k.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=k.device).tril()
    if window is not None:
        causal = causal.triu(1 - window)
    if segments is not None:
        causal = causal & (segments[:, None, :, None] == segments[:, None, None, :])
    return causal if positions is None else causal.index_select(-2, positions)


def _dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sink: Tensor | None, softcap: float | None) -> Tensor:
    groups, plain = q.shape[1] // k.shape[1], sink is None and softcap is None
    if groups > 1 and (q.is_cuda or not plain):  # on CUDA, torch has no kernel for a mask with grouped heads
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    if plain:
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1])
    scores = soft_cap((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5, softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink is None:
        return wide(scores).softmax(-1).to(v.dtype) @ v
    column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def _flex(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, sink: Tensor | None, window: int | None,
    softcap: float | None, grouped: bool, positions: Tensor | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if positions is not None:
            i = positions[i]
        visible = i >= j
        if segments is not None:
            visible = visible & (segments[b, i] == segments[b, j])
        return visible if window is None else visible & (i - j < window)

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return soft_cap(score, softcap)

    lengths = q.shape[2], k.shape[2]
    mask = create_block_mask(rule, None if segments is None else len(q), None, *lengths, device=q.device)
    attending = partial(flex_attention, score_mod=None if softcap is None else capped, block_mask=mask)
    if sink is None:
        return attending(q, k, v, enable_gqa=grouped)
    y, aux = attending(q, k, v, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    # softmax with exp(sink) in the denominator is the plain softmax scaled by e^lse / (e^lse + e^sink)
    scaled: Tensor = y * torch.sigmoid(aux.lse - sink[:, None])[..., None].to(y.dtype)
    return scaled
