"""The delta rule with a decay per channel in plain PyTorch (Kimi Linear, arXiv 2510.26692).

    S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   α_t = exp(g_t) [K],   o_t = S_tᵀ q_t

With one α for all channels it is the gated delta rule (`ops.gated_delta`). `naive` is this loop, the truth; `chunked`
does the same work in matrix products; `step` is one iteration of the loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops._runtime.numeric import begins, no_autocast, wide
from residua.ops.gated_delta.reference import CHUNK, initial_state, read, same_document, to_chunks, to_heads

BLOCK = 16
BLOCKS = CHUNK // BLOCK


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunked`, token by token: the same arguments and results."""
    check_shapes(q, k, v, g, beta)
    state = initial_state(k, v, state)
    first = begins(v, segments)
    outputs = []
    for t in range(v.shape[1]):
        state = state.masked_fill(first[:, t, None, None, None], 0)
        o, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outputs.append(o)
    return torch.stack(outputs, 1) if outputs else v, state


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, H_k, K], v [B, H, V], g [B, H, K], beta [B, H], state [B, H, K, V]; returns o and the state.

    S ← α S,   u = β (v − Sᵀk),   S ← S + k uᵀ,   o = Sᵀq
    """
    q, k = (to_heads(wide(x), v.shape[-2]) for x in (q, k))
    faded = wide(g).exp()[..., None] * initial_state(k, v, state)
    u = wide(beta)[..., None] * (wide(v) - read(faded, k))
    state = faded + k[..., :, None] * u[..., None, :]
    return read(state, q).to(v.dtype), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule with a decay per channel, in chunks of 64 tokens: one small product per chunk waits for the last.

        S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   α_t = exp(g_t) [K],   o_t = S_tᵀ q_t

    q, k [B, T, H_k, K], v [B, T, H, V] with H a multiple of H_k; log decay g ≤ 0 [B, T, H, K] and share beta [B, T, H];
    keys of unit length keep the state bounded. The first token continues `state` [B, H, K, V] (zero if None), and a
    token whose entry of `segments` [B, T] differs from the one before begins a document, with an empty state.
    Returns o [B, T, H, V] in v's dtype and the last state in at least float32.

    Inside a chunk that meets the state S, with G_i = Σ_{j≤i} g_j [K], the loop's u solves a unit triangular system:

        (x, y)_ij = Σ_c x_ic y_jc exp(G_ic − G_jc) for j ≤ i in one document,   enter_i = exp(G_i)
        u_i + β_i Σ_{j<i} (k, k)_ij u_j = β_i (v_i − Sᵀ(enter_i ⊙ k_i))   ⇒   U = Ū − W S
        o_i = Sᵀ(enter_i ⊙ q_i) + Σ_{j≤i} (q, k)_ij u_j
        S'  = Diag(enter_last) S + Σ_j (exp(G_last − G_j) ⊙ k_j) u_jᵀ = M S + N

    Ū, W, M and N of all chunks come at once, then the states one after the other, then all outputs.
    """
    return in_chunks(_decayed_products, q, k, v, g, beta, segments, state)


def in_chunks(
    products: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`chunked`, given what computes (k, k) and (q, k) of k, q and G."""
    check_shapes(q, k, v, g, beta)
    tokens, heads, value_width = v.shape[1:]
    with no_autocast(v):  # the system inside a chunk is solved in single precision
        before = initial_state(k, v, state)
        q, k = (to_heads(wide(x), heads) for x in (q, k))
        q, k, values, g, beta = (to_chunks(wide(x)) for x in (q, k, v, g, beta[..., None]))
        visible, met = same_document(begins(v, segments), g.shape[2])
        total = g.cumsum(-2)
        enter = total.masked_fill(~met[..., None], float("-inf")).exp()
        leave = (total[..., -1:, :] - total).masked_fill(~visible[..., -1, :, None], float("-inf")).exp()

        of_keys, of_queries = (pairs.masked_fill(~visible, 0) for pairs in products(k, q, total))
        right = torch.cat([beta * values, beta * (enter * k)], -1)
        solved = torch.linalg.solve_triangular(beta * of_keys, right, upper=False, unitriangular=True)
        u, w = solved.split([value_width, k.shape[-1]], -1)

        leaving = (leave * k).mT
        carry, add = torch.diag_embed(enter[..., -1, :]) - leaving @ w, leaving @ u
        states = [before]
        for m, n in zip(carry.unbind(2), add.unbind(2), strict=True):
            states.append(m @ states[-1] + n)

        reached = torch.stack(states[:-1], 2)
        o = (enter * q) @ reached + of_queries @ (u - w @ reached)
    return o.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(v.dtype), states[-1]


def _decayed_products(k: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """(k, k) and (q, k) [B, H, N, 64, 64] of k, q and the cumulative log decays G, [B, H, N, 64, K].

    exp(G_i) exp(−G_j) would overflow. For i in a block of 16 and j in an earlier one, both factors are at most 1 with
    the end R of the block before i's between them: exp(G_i − R) exp(R − G_j). Within a block the decays are formed
    pair by pair. Above the diagonal the result is meaningless but finite.
    """
    g, keys, queries = (x.unflatten(-2, (BLOCKS, BLOCK)) for x in (total, k, q))
    bound = pad(g[..., :-1, -1, :], (0, 0, 1, 0))[..., None, :]  # R of each block, [B, H, N, 4, 1, K]

    earlier = torch.arange(CHUNK, device=k.device) < torch.arange(BLOCKS, device=k.device)[:, None] * BLOCK  # [4, 64]
    onward = (bound - total[..., None, :, :]).masked_fill(~earlier[..., None], float("-inf")).exp()
    inward = (g - bound).exp()
    rows = torch.cat([inward * keys, inward * queries], -2)  # one product for both, [B, H, N, 4, 2·16, K]
    across = (rows @ (onward * k[..., None, :, :]).mT).unflatten(-2, (2, BLOCK))  # [B, H, N, 4, 2, 16, 64]

    lower = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=k.device).tril()
    decay = (g[..., :, None, :] - g[..., None, :, :]).masked_fill(~lower[..., None], float("-inf")).exp()
    faded = decay * keys[..., None, :, :]  # [B, H, N, 4, 16, 16, K]
    within = torch.stack([(x[..., :, None, :] * faded).sum(-1) for x in (keys, queries)], -3)
    own = torch.eye(BLOCKS, dtype=k.dtype, device=k.device)[:, None, None, :, None]  # [4, 1, 1, 4, 1]
    whole = across + (within[..., None, :] * own).flatten(-2)
    of_keys, of_queries = (x.flatten(-3, -2) for x in whole.unbind(-3))
    return of_keys, of_queries


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Refuse arguments of `chunked` whose shapes do not go together."""
    if q.shape != k.shape or q.shape[:2] != v.shape[:2] or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"kimi_delta: q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}: expected "
            "[B, T, H_k, K] twice and [B, T, H, V] with H a multiple of H_k."
        )
    if g.shape != (*v.shape[:3], k.shape[-1]) or beta.shape != v.shape[:3]:
        raise ValueError(
            f"kimi_delta: g and beta have shapes {tuple(g.shape)} and {tuple(beta.shape)}, k has {tuple(k.shape)} and "
            f"v {tuple(v.shape)}: expected [B, T, H, K] and [B, T, H]."
        )
