"""Delta rules in plain PyTorch, with a decay per head (Gated Delta Networks, arXiv 2412.06464) or per channel of a key
(Kimi Linear, arXiv 2510.26692).

    S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   α_t = exp(g_t),   o_t = S_tᵀ q_t

The state S [K, V] is a memory from keys to values (the papers' state, transposed): it decays by α, then the value
stored under k_t moves towards v_t by the share β. `naive` is this loop and the definition; `gated_delta` and
`kimi_delta` compute the same with matrix products; `step` is one iteration of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops._runtime.numeric import begins, no_autocast, wide

CHUNK = 64
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
    """`gated_delta` or `kimi_delta`, depending on g's shape, token by token: the same arguments and results."""
    check_shapes(q, k, v, g, beta, per_channel=g.dim() == 4)
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
    """One token: q, k [B, H_k, K], v [B, H, V], g [B, H] or [B, H, K], beta [B, H], state [B, H, K, V]; returns
    o [B, H, V] and the state.

    S ← α S,   u = β (v − Sᵀk),   S ← S + k uᵀ,   o = Sᵀq
    """
    q, k = (_to_heads(wide(x), v.shape[-2]) for x in (q, k))
    g = g if g.dim() == k.dim() else g[..., None]
    faded = wide(g).exp()[..., None] * initial_state(k, v, state)
    u = wide(beta)[..., None] * (wide(v) - _read(faded, k))
    state = faded + k[..., :, None] * u[..., None, :]
    return _read(state, q).to(v.dtype), state


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in chunks of 64 tokens; only one small product per chunk depends on the previous chunk.

        S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   α_t = exp(g_t),   o_t = S_tᵀ q_t

    q, k [B, T, H_k, K], v [B, T, H, V] with H a multiple of H_k; log decay g ≤ 0 and share beta [B, T, H]; keys of unit
    length keep the state bounded. The first token continues `state` [B, H, K, V] (zero if None). A token whose entry of
    `segments` [B, T] differs from the previous one begins a document, with an empty state. Returns o [B, T, H, V] in
    v's dtype and the last state in at least float32.

    Let G_i = Σ_{j≤i} g_j, within_ij = exp(G_i − G_j) for j ≤ i and enter_i = exp(G_i), both 0 where a document begins
    in between. In a chunk that starts from the state S, the loop's u solves a unit triangular system:

        u_i + β_i Σ_{j<i} within_ij (k_i·k_j) u_j = β_i (v_i − enter_i Sᵀk_i)   ⇒   U = Ū − W S
        o_i = enter_i Sᵀq_i + Σ_{j≤i} within_ij (q_i·k_j) u_j
        S'  = enter_last S + Σ_j within_last,j k_j u_jᵀ = M S + N

    Ū, W, M and N of all chunks are computed in parallel, then the states sequentially, then all outputs.
    """
    check_shapes(q, k, v, g, beta, per_channel=False)
    return _in_chunks(_PerHead, q, k, v, g[..., None], beta, segments, state)


def kimi_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule with a decay per channel in chunks of 64 tokens; one small product per chunk depends on the last.

        S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   α_t = exp(g_t) [K],   o_t = S_tᵀ q_t

    q, k [B, T, H_k, K], v [B, T, H, V] with H a multiple of H_k; log decay g ≤ 0 [B, T, H, K] and share beta [B, T, H];
    `segments`, `state` and results as in `gated_delta`.

    In a chunk that starts from the state S, with G_i = Σ_{j≤i} g_j [K], the loop's u solves a unit triangular system:

        (x, y)_ij = Σ_c x_ic y_jc exp(G_ic − G_jc) for j ≤ i in one document,   enter_i = exp(G_i)
        u_i + β_i Σ_{j<i} (k, k)_ij u_j = β_i (v_i − Sᵀ(enter_i ⊙ k_i))   ⇒   U = Ū − W S
        o_i = Sᵀ(enter_i ⊙ q_i) + Σ_{j≤i} (q, k)_ij u_j
        S'  = Diag(enter_last) S + Σ_j (exp(G_last − G_j) ⊙ k_j) u_jᵀ = M S + N
    """
    check_shapes(q, k, v, g, beta, per_channel=True)
    return _in_chunks(_PerChannel, q, k, v, g, beta, segments, state)


class Decays(Protocol):
    """The decays of a rule, from q, k, G, β of all chunks [B, H, N, 64, ·] and the documents."""

    enter: Tensor
    """exp(G_i)"""

    def __init__(self, q: Tensor, k: Tensor, total: Tensor, beta: Tensor, visible: Tensor, met: Tensor) -> None:
        """`visible` and `met` are those of `_same_document`."""

    def system(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix β_i (k, k)_ij, used only below the diagonal, and [β v, β enter ⊙ k]."""

    def leaving(self) -> Tensor:
        """(exp(G_last − G_j) ⊙ k_j)ᵀ"""

    def fade(self) -> Tensor:
        """Diag(enter_last)"""

    def reads(self) -> Tensor:
        """(q, k)_ij for j ≤ i."""


def _in_chunks(
    decays: Callable[..., Decays],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute a delta rule in chunks; g [B, T, H, 1 or K]."""
    tokens, heads, value_width = v.shape[1:]
    with no_autocast(v):  # the system inside a chunk is solved in single precision
        before = initial_state(k, v, state)
        q, k = (_to_heads(wide(x), heads) for x in (q, k))
        q, k, values, g, beta = (_to_chunks(wide(x)) for x in (q, k, v, g, beta[..., None]))
        of = decays(q, k, g.cumsum(-2), beta, *_same_document(begins(v, segments), g.shape[2]))

        solved = torch.linalg.solve_triangular(*of.system(values), upper=False, unitriangular=True)
        u, w = solved.split([value_width, k.shape[-1]], -1)

        leaving = of.leaving()
        carry, add = of.fade() - leaving @ w, leaving @ u
        states = [before]
        for m, n in zip(carry.unbind(2), add.unbind(2), strict=True):
            states.append(m @ states[-1] + n)

        reached = torch.stack(states[:-1], 2)
        o = (of.enter * q) @ reached + of.reads() @ (u - w @ reached)
    return o.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(v.dtype), states[-1]


class _PerHead:
    """One decay for all channels: the products of keys and queries are plain, and each is multiplied by `within`."""

    def __init__(self, q: Tensor, k: Tensor, total: Tensor, beta: Tensor, visible: Tensor, met: Tensor) -> None:
        self.q, self.k, self.beta = q, k, beta
        total = total.squeeze(-1)
        # Mask the exponent, not the result: above the diagonal the exponent is positive and may overflow.
        self.within = (total[..., :, None] - total[..., None, :]).masked_fill(~visible, float("-inf")).exp()
        self.enter = total.masked_fill(~met, float("-inf")).exp()[..., None]

    def system(self, values: Tensor) -> tuple[Tensor, Tensor]:
        triangle = self.beta * self.within * (self.k @ self.k.mT)
        return triangle, torch.cat([self.beta * values, self.beta * self.enter * self.k], -1)

    def leaving(self) -> Tensor:
        return (self.within[..., -1, :, None] * self.k).mT

    def fade(self) -> Tensor:
        return self.enter[..., -1:, :] * torch.eye(self.k.shape[-1], dtype=self.k.dtype, device=self.k.device)

    def reads(self) -> Tensor:
        return self.within * (self.q @ self.k.mT)


def _decayed_products(k: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """(k, k) and (q, k) [B, H, N, 64, 64] of k, q and the cumulative log decays G, [B, H, N, 64, K].

    exp(G_i) exp(−G_j) would overflow. For i in a block of 16 and j in an earlier one, let R be G at the end of the
    block before i's: both factors of exp(G_i − R) exp(R − G_j) are at most 1. Within a block the decays are computed
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
    diagonal = torch.eye(BLOCKS, dtype=k.dtype, device=k.device)[:, None, None, :, None]  # [4, 1, 1, 4, 1]
    whole = across + (within[..., None, :] * diagonal).flatten(-2)
    of_keys, of_queries = (x.flatten(-3, -2) for x in whole.unbind(-3))
    return of_keys, of_queries


class _PerChannel:
    """A decay for each channel."""

    def __init__(self, q: Tensor, k: Tensor, total: Tensor, beta: Tensor, visible: Tensor, met: Tensor) -> None:
        self.k, self.beta = k, beta
        self.enter = total.masked_fill(~met[..., None], float("-inf")).exp()
        self.leave = (total[..., -1:, :] - total).masked_fill(~visible[..., -1, :, None], float("-inf")).exp()
        self.of_keys, self.of_queries = (x.masked_fill(~visible, 0) for x in _decayed_products(k, q, total))

    def system(self, values: Tensor) -> tuple[Tensor, Tensor]:
        right = torch.cat([self.beta * values, self.beta * (self.enter * self.k)], -1)
        return self.beta * self.of_keys, right

    def leaving(self) -> Tensor:
        return (self.leave * self.k).mT

    def fade(self) -> Tensor:
        return torch.diag_embed(self.enter[..., -1, :])

    def reads(self) -> Tensor:
        return self.of_queries


def _same_document(first: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """visible [B, 1, N, 64, 64]: whether token i is in the document of token j ≤ i of its chunk.

    met [B, 1, N, 64]: whether it is in the document of the state that its chunk starts from. first [B, T] marks the
    first tokens of documents.
    """
    document = pad(first, (0, chunks * CHUNK - first.shape[1])).cumsum(1).unflatten(1, (chunks, CHUNK))[:, None]
    before = pad(document[:, :, :-1, -1:], (0, 0, 1, 0))
    return (document[..., :, None] == document[..., None, :]).tril(), document == before


def _to_chunks(x: Tensor) -> Tensor:
    """[B, T, H, D] → [B, H, N, 64, D] with N ≥ 1. A token of zeros neither fades the state nor writes to it."""
    padded = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK if x.shape[1] else CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def _to_heads(x: Tensor, heads: int) -> Tensor:
    """[…, H_k, K] → […, H, K]: each key head serves a run of value heads."""
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Sᵀk as a sum, not a matrix product: one token is limited by memory, and autocast does not affect sums."""
    return (state * key[..., :, None]).sum(-2)


def initial_state(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    """The state that a call starts from: the given one, or zero, [B, H, K, V]."""
    values = wide(v)
    if state is not None:
        return state.to(values.dtype)
    return values.new_zeros(v.shape[0], *v.shape[-2:-1], k.shape[-1], v.shape[-1])


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, per_channel: bool) -> None:
    """Refuse arguments with inconsistent shapes."""
    name = "kimi_delta" if per_channel else "gated_delta"
    if q.shape != k.shape or q.shape[:2] != v.shape[:2] or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"{name}: q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}: expected "
            "[B, T, H_k, K] twice and [B, T, H, V] with H a multiple of H_k."
        )
    if per_channel and (g.shape != (*v.shape[:3], k.shape[-1]) or beta.shape != v.shape[:3]):
        raise ValueError(
            f"{name}: g and beta have shapes {tuple(g.shape)} and {tuple(beta.shape)}, k has {tuple(k.shape)} and "
            f"v {tuple(v.shape)}: expected [B, T, H, K] and [B, T, H]."
        )
    if not per_channel and (g.shape != v.shape[:3] or beta.shape != v.shape[:3]):
        raise ValueError(
            f"{name}: g and beta have shapes {tuple(g.shape)} and {tuple(beta.shape)}, v has {tuple(v.shape)}: "
            "expected its shape without the last axis."
        )
