"""The gated delta rule in plain PyTorch (Gated Delta Networks, arXiv 2412.06464).

    S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   α_t = exp(g_t),   o_t = S_tᵀ q_t

The state S [K, V] is a memory from keys to values (the paper's, transposed): it decays by α, then what it holds under
k_t moves towards v_t by the share β. `naive` is this loop, the truth; `chunked` does the same work in matrix products;
`step` is one iteration of the loop.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops._runtime.numeric import begins, no_autocast, wide

CHUNK = 64


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
    """One token: q, k [B, H_k, K], v [B, H, V], g, beta [B, H], state [B, H, K, V]; returns o [B, H, V] and the state.

    S ← α S,   u = β (v − Sᵀk),   S ← S + k uᵀ,   o = Sᵀq
    """
    q, k = (to_heads(wide(x), v.shape[-2]) for x in (q, k))
    faded = wide(g).exp()[..., None, None] * initial_state(k, v, state)
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
    """The gated delta rule, in chunks of 64 tokens: one small product per chunk waits for the last.

        S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   α_t = exp(g_t),   o_t = S_tᵀ q_t

    q, k [B, T, H_k, K], v [B, T, H, V] with H a multiple of H_k; log decay g ≤ 0 and share beta [B, T, H]; keys of unit
    length keep the state bounded. The first token continues `state` [B, H, K, V] (zero if None), and a token whose
    entry of `segments` [B, T] differs from the one before begins a document, with an empty state.
    Returns o [B, T, H, V] in v's dtype and the last state in at least float32.

    Inside a chunk that meets the state S, with G_i = Σ_{j≤i} g_j, within_ij = exp(G_i − G_j) for j ≤ i and
    enter_i = exp(G_i) (both 0 where a document begins in between), the loop's u solves a unit triangular system:

        u_i + β_i Σ_{j<i} within_ij (k_i·k_j) u_j = β_i (v_i − enter_i Sᵀk_i)   ⇒   U = Ū − W S
        o_i = enter_i Sᵀq_i + Σ_{j≤i} within_ij (q_i·k_j) u_j
        S'  = enter_last S + Σ_j within_last,j k_j u_jᵀ = M S + N

    Ū, W, M and N of all chunks come at once, then the states one after the other, then all outputs.
    """
    check_shapes(q, k, v, g, beta)
    tokens, heads, value_width = v.shape[1:]
    with no_autocast(v):  # the system inside a chunk is solved in single precision
        before = initial_state(k, v, state)
        q, k = (to_heads(wide(x), heads) for x in (q, k))
        q, k, values, g, beta = (to_chunks(wide(x)) for x in (q, k, v, g[..., None], beta[..., None]))
        within, enter = _decays(g.squeeze(-1), begins(v, segments))

        triangle = beta * within * (k @ k.mT)
        right = torch.cat([beta * values, beta * enter * k], -1)
        solved = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
        u, w = solved.split([value_width, k.shape[-1]], -1)

        leaving = (within[..., -1, :, None] * k).mT
        identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        carry, add = enter[..., -1:, :] * identity - leaving @ w, leaving @ u
        states = [before]
        for m, n in zip(carry.unbind(2), add.unbind(2), strict=True):
            states.append(m @ states[-1] + n)

        met = torch.stack(states[:-1], 2)
        o = (enter * q) @ met + (within * (q @ k.mT)) @ (u - w @ met)
    return o.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(v.dtype), states[-1]


def _decays(g: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of token j at token i, within [B, H, N, 64, 64], and of the state met, enter [B, H, N, 64, 1].

    g [B, H, N, 64]; first [B, T] marks the tokens that begin a document.
    """
    visible, met = same_document(first, g.shape[2])
    total = g.cumsum(-1)
    # The exponent is masked, not the result: above the diagonal it is positive and may overflow.
    within = (total[..., :, None] - total[..., None, :]).masked_fill(~visible, float("-inf")).exp()
    enter = total.masked_fill(~met, float("-inf")).exp()
    return within, enter[..., None]


def same_document(first: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Whether token i is in the document of an earlier token j of its chunk (or is j), visible [B, 1, N, 64, 64], and
    whether in that of the state that its chunk meets, met [B, 1, N, 64]. first [B, T] marks beginnings of documents.
    """
    document = pad(first, (0, chunks * CHUNK - first.shape[1])).cumsum(1).unflatten(1, (chunks, CHUNK))[:, None]
    before = pad(document[:, :, :-1, -1:], (0, 0, 1, 0))
    return (document[..., :, None] == document[..., None, :]).tril(), document == before


def to_chunks(x: Tensor) -> Tensor:
    """[B, T, H, D] → [B, H, N, 64, D] with N ≥ 1. A token of zeros neither fades the state nor writes to it."""
    padded = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK if x.shape[1] else CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def to_heads(x: Tensor, heads: int) -> Tensor:
    """[…, H_k, K] → […, H, K]: each key head serves a run of value heads."""
    return x.repeat_interleave(heads // x.shape[-2], -2)


def read(state: Tensor, key: Tensor) -> Tensor:
    """Sᵀk, as a sum and not a matrix product: one token is bound by memory, and autocast leaves sums alone."""
    return (state * key[..., :, None]).sum(-2)


def initial_state(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    """The state a call starts from: the one given, or zero, [B, H, K, V]."""
    values = wide(v)
    if state is not None:
        return state.to(values.dtype)
    return values.new_zeros(v.shape[0], *v.shape[-2:-1], k.shape[-1], v.shape[-1])


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Refuse arguments of `chunked` whose shapes do not go together."""
    if q.shape != k.shape or q.shape[:2] != v.shape[:2] or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"gated_delta: q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}: expected "
            "[B, T, H_k, K] twice and [B, T, H, V] with H a multiple of H_k."
        )
    if g.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        raise ValueError(
            f"gated_delta: g and beta have shapes {tuple(g.shape)} and {tuple(beta.shape)}, v has {tuple(v.shape)}: "
            "expected its shape without the last axis."
        )
