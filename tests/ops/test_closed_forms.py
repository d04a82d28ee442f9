"""The backward passes that the fused kernels will compute, in closed form, against autograd."""

import pytest
import torch

from residua import ops
from tests.golden import multigate
from tests.golden.attnres import Reader, SavedRead, deferred_source_gradient
from tests.golden.compare import close, random


@pytest.mark.parametrize("competitive", [True, False], ids=["competitive", "independent"])
@pytest.mark.parametrize("width", [7, 33])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_multi_gates_closed_form_backward_is_autograds(n: int, width: int, competitive: bool) -> None:
    leaves = {
        "streams": random(n, width, seed=1),
        "update": random(width, seed=2),
        "gate_query": random(width, seed=3, scale=3.0),
        "gate_bias": random(n + competitive, seed=4),
        "pool_query": random(width, seed=5, scale=3.0),
    }
    g_h, g_s = random(width, seed=6, grad=False), random(n, width, seed=7, grad=False)
    hidden, after = ops.multi_gate(**leaves, competitive=competitive)
    autograd = torch.autograd.grad([hidden, after], list(leaves.values()), [g_h, g_s])

    s, f, w1, b, w2 = (leaf.detach() for leaf in leaves.values())
    closed = multigate.backward([*s], f, w1, b, w2, g_h, [*g_s], competitive)
    for name, gradient in zip(leaves, autograd, strict=True):
        close(f"gradient of {name}", closed[name], gradient)


@pytest.mark.parametrize("competitive", [True, False], ids=["competitive", "independent"])
def test_a_norm_behind_the_gates_is_undone_with_their_own_rows(competitive: bool) -> None:
    """With x = gain ⊙ h·r: g_h = r·u − p·h, where h and the dot products with g_h need no row but s_i, f and g_x."""
    n, width, eps = 4, 33, 1e-3
    shapes = {"streams": (n, width), "update": (width,), "gate_query": (width,), "gate_bias": (n + competitive,)}
    shapes |= {"pool_query": (width,), "gain": (width,)}
    leaves = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items(), 1)}
    *before, gain = leaves.values()
    g_x, g_s = random(width, seed=8, grad=False), random(n, width, seed=9, grad=False)
    h, after = ops.multi_gate(*before, competitive=competitive)
    x = ops.rms_norm(h, gain, eps=eps)
    autograd = torch.autograd.grad([x, after], list(leaves.values()), [g_x, g_s])

    with torch.no_grad():
        s, f, w1, b, w2 = before
        beta = ops.gates(s, w1, b, competitive=competitive)
        a = ops.pool_weights(after, w2)
        in_s, in_f = a * (1 - beta), (a * beta).sum()
        made = in_s @ s + in_f * f
        close("h", made, h, 1e-13)
        r = (made.square().mean() + eps).rsqrt()
        u = gain * g_x
        pull = (in_s @ (s @ u) + in_f * (u @ f)) * r**3 / width
        g_h = r * u - pull * made
        close("g_h · s", r * (s @ u) - pull * (s @ made), s @ g_h, 1e-12)
        close("g_h · f", r * (u @ f) - pull * (made @ f), g_h @ f, 1e-12)
        closed = multigate.backward([*s], f, w1, b, w2, g_h, [*g_s], competitive) | {"gain": r * g_x * made}
    for name, gradient in zip(leaves, autograd, strict=True):
        close(f"gradient of {name}", closed[name], gradient)


@pytest.mark.parametrize("width", [7, 33])
def test_deferred_attention_residual_backward_equals_autograd(width: int) -> None:
    """A small model's reads: each source is read by every later reader, and dv_i is written once."""
    count = 6
    v = [random(width, seed=i) for i in range(count)]
    readers = [Reader(random(width, seed=20 + i), random(width, seed=40 + i), scale=0.7) for i in range(1, count)]
    dh = [random(width, seed=60 + i, grad=False) for i in range(1, count)]
    seen = [list(range(i + 1)) for i in range(1, count)]

    hidden = [
        ops.depth_attention([v[i] for i in s], r.w, norm_weight=r.g, scale=r.scale)
        for s, r in zip(seen, readers, strict=True)
    ]
    leaves = [*v, *(r.w for r in readers), *(r.g for r in readers)]
    autograd = torch.autograd.grad(hidden, leaves, dh)

    with torch.no_grad():
        reads = [SavedRead.of(r, s, v) for s, r in zip(seen, readers, strict=True)]
        du = [torch.zeros_like(r.w) for r in readers]
        for i in range(count):
            dv, shares = deferred_source_gradient(i, v[i], reads, dh)
            close(f"gradient of source {i}", dv, autograd[i])
            for at, share in enumerate(shares):
                du[at] += 0 if share is None else share
        for at, r in enumerate(readers):
            close(f"gradient of query {at}", r.scale * r.g * du[at], autograd[count + at])
            close(f"gradient of gain {at}", r.scale * r.w * du[at], autograd[count + len(readers) + at])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_one_reduction_gives_written_stream_norm_and_score(beta: float) -> None:
    s, f, w = (random(33, seed=i, grad=False) for i in range(3))
    after = s + beta * (f - s)
    norm2 = (1 - beta) ** 2 * (s @ s) + 2 * beta * (1 - beta) * (s @ f) + beta**2 * (f @ f)
    close("‖s'‖²", norm2, after @ after, 1e-13)
    close("w · s'", (1 - beta) * (w @ s) + beta * (w @ f), w @ after, 1e-13)
