"""Triton kernels of whole layers: all the phases of a model in one launch, or each phase in a launch of its own.

A layer has five phases: project (Q, K and V), attend, out, up with the activation, and down; after the last layer the
final norm is a sixth. Programs, one per multiprocessor, run them in step, with a barrier after each. A program owns
rows of every matrix, with one row of a tile per warp. It loads a phase's rows into registers *before* it waits for the
results of the previous phase, so that memory works while programs wait. The last SPARE programs have no rows; they
write the state and prepare the next junction (`kernels_entry.py`).

The barrier counts arrivals, P more for each phase. It needs all programs on the GPU at once, so the launcher requests a
cooperative launch of no more programs than multiprocessors. Results are added in a fixed order, without atomics.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor
from residua.ops.inference.kernels_sublayers import activation
from residua.ops.whole_layers.kernels_entry import enter, prepare, write
from residua.ops.whole_layers.kernels_heads import (
    anchored,
    anchored_halves,
    factors,
    gate_parts,
    gated,
    mixed,
    network,
    turned,
)

ALL = tl.constexpr(-1)
"""Run every phase, with barriers; other values are the number of the only phase to run."""
PHASES = tl.constexpr(5)
SHARE = tl.constexpr(16)
"""A share of a head's slots is a multiple of this."""


@triton.jit
def _arrived(count_ptr):
    """How many arrivals there were; what was stored before them is visible to the thread that reads this."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [count_ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _wait(count_ptr, arrivals, ONLY: tl.constexpr):
    if ONLY == ALL:
        count = _arrived(count_ptr)
        while count < arrivals:
            count = _arrived(count_ptr)


@triton.jit
def _arrive(count_ptr, ONLY: tl.constexpr):
    if ONLY == ALL:
        tl.debug_barrier()  # all threads' stores come before the arrival that announces them
        tl.atomic_add(count_ptr, 1, sem="release")


@triton.jit
def _again(program, ONLY: tl.constexpr):
    """A number, such as the program's, hidden from the compiler, which would compute the addresses of all phases before
    the loop over layers, and has no registers for them."""
    if ONLY == ALL:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return program


@triton.jit
def _held(
    w_ptr, program, RESULTS: tl.constexpr, C: tl.constexpr, WORK: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """A program's share of a matrix [RESULTS, C]: tiles of ROWS rows, in turn, each as lines [ROWS, LINE].

    A line is what a warp loads at once, so that a warp has a row, and sums need no other warp. In one wide tile the
    compiler would divide rows among warps, or divide them otherwise in other versions.
    """
    SHARED: tl.constexpr = (RESULTS + WORK - 1) // WORK
    b_w = ()
    for t in tl.static_range((SHARED + ROWS - 1) // ROWS):
        row = t * ROWS + tl.arange(0, ROWS)
        live = ((row < SHARED) & (program * SHARED + row < RESULTS))[:, None]
        row_ptr = w_ptr + (program * SHARED + row)[:, None] * C
        for piece in tl.static_range((C + LINE - 1) // LINE):
            c = piece * LINE + tl.arange(0, LINE)[None, :]
            mask = live & (c >= 0) if (piece + 1) * LINE <= C else live & (c < C)
            b_w = b_w + (tl.load(row_ptr + c, mask=mask, other=0.0),)
    return b_w


@triton.jit
def _products(b_w, b_x, t: tl.constexpr, LINES: tl.constexpr):
    """W x of tile t of a program's rows [ROWS]; x as lines [LINE], or [ROWS, LINE] where each warp has its own."""
    b_y = b_w[t * LINES].to(tl.float32) * b_x[0].to(tl.float32)
    for piece in tl.static_range(1, LINES):
        b_y += b_w[t * LINES + piece].to(tl.float32) * b_x[piece].to(tl.float32)
    return tl.sum(b_y, 1)


@triton.jit
def _row(x_ptr, C: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr):
    """A vector for every row of a tile, as lines [ROWS, LINE]: each warp loads it for itself."""
    every, b_x = tl.zeros([ROWS], tl.int32)[:, None], ()
    for piece in tl.static_range((C + LINE - 1) // LINE):
        c = piece * LINE + tl.arange(0, LINE)[None, :] + every
        b_x = b_x + (tl.load(x_ptr + c, mask=c < C, other=0.0),)
    return b_x


@triton.jit
def _store_rows(
    y_ptr, b_y, program, t: tl.constexpr, RESULTS: tl.constexpr, WORK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    SHARED: tl.constexpr = (RESULTS + WORK - 1) // WORK
    row = t * ROWS + tl.arange(0, ROWS)
    live = (row < SHARED) & (program * SHARED + row < RESULTS)
    tl.store(y_ptr + program * SHARED + row, b_y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _slots(x_ptr, cell, start, end, stride_ks, live, LANES: tl.constexpr, SLOTS: tl.constexpr):
    """Keys or values of the slots from `start` on, up to `end` [SLOTS, LANES]."""
    slot, d = start + tl.arange(0, SLOTS)[:, None], tl.arange(0, LANES)[None, :]
    return tl.load(x_ptr + cell + slot * stride_ks + d, mask=(slot < end) & live[None, :], other=0.0)


@triton.jit
def _attend_tile(b_k, b_v, b_q, b_top, b_total, b_o, start, end, SLOTS: tl.constexpr):
    """Online softmax; every lane keeps its own maximum."""
    live = start + tl.arange(0, SLOTS) < end
    b_z = tl.where(live, tl.sum(b_k.to(tl.float32) * b_q[None, :], 1), -float("inf"))  # [SLOTS]
    b_higher = tl.maximum(b_top, b_z)
    b_safe = tl.where(b_higher == -float("inf"), 0.0, b_higher)
    b_e, b_keep = tl.exp(b_z - b_safe), tl.exp(b_top - b_safe)
    b_o = b_o * b_keep[:, None] + b_e[:, None] * b_v.to(tl.float32)
    return b_higher, b_total * b_keep + b_e, b_o


@triton.jit
def _attend(
    k_ptr, v_ptr, projected_ptr, gains_ptr, cos_ptr, sin_ptr, lengths_ptr, anchor_ptr, mixing_ptr, part_ptr, lse_ptr,
    count_ptr, arrivals, layer, item, key_eps, scale, stride_kb, stride_ks, stride_kh,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, E: tl.constexpr, LANES_E: tl.constexpr, MIXED: tl.constexpr, SPLITS: tl.constexpr,
    SLOTS: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """One head's share of the slots. The first share has the new token as well, and puts it into the cache.

    If "values" are MIXED, V̂ = λ1 ⊙ V_anc + λ2 ⊙ V, with the values of the first layer as anchor. If "heads" are, so are
    queries and keys before their norm, with anchors that are there from the start; and with E, λ ⊙ γ stands for λ.
    """
    GROUPS: tl.constexpr = HEADS // KV
    EVERY: tl.constexpr = MIXED == "heads"
    HEADED: tl.constexpr = (HEADS + 2 * KV) * D + HEADS * GATE
    WIDTH: tl.constexpr = HEADED if EVERY else KV * D
    split, m, h = item % SPLITS, item // SPLITS // HEADS, item // SPLITS % HEADS
    d = tl.arange(0, LANES)
    live = d < D
    position = tl.load(lengths_ptr + m)
    share = tl.cdiv(tl.cdiv(position, SPLITS), SHARE) * SHARE
    first, end = split * share, tl.minimum((split + 1) * share, position)
    cell = m.to(tl.int64) * stride_kb + (h // GROUPS) * stride_kh
    # the first slots, which earlier launches filled, before the heads of the new token are there
    b_k = _slots(k_ptr, cell, first, end, stride_ks, live, LANES, SLOTS)
    b_v = _slots(v_ptr, cell, first, end, stride_ks, live, LANES, SLOTS)
    of_query, of_key, g = (), (), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    if MIXED != "none":
        channel = (HEADS * EVERY + KV * EVERY + h // GROUPS) * D + d
        known = live if EVERY else live & (layer > 0)
        own_anchor_ptr = anchor_ptr + m * WIDTH
        own_mixing_ptr = mixing_ptr + layer * (2 * WIDTH + 8 * (E + 1) * (E > 0))
        of_value = anchored(own_anchor_ptr, own_mixing_ptr, channel, known, live, WIDTH)
    if EVERY:
        of_query = anchored_halves(own_anchor_ptr, own_mixing_ptr, h * D, D, LANES, WIDTH)
        of_key = anchored_halves(own_anchor_ptr, own_mixing_ptr, (HEADS + h // GROUPS) * D, D, LANES, WIDTH)
    if E:
        b_network = network(own_mixing_ptr + 2 * WIDTH, 0, 6, E, LANES_E)
    _wait(count_ptr, arrivals, ONLY)
    row_ptr = projected_ptr + m * (HEADED + E)
    if E:
        g = factors(row_ptr + HEADED, b_network, 6, E, LANES_E)
    angles = position * (D // 2)
    b_q = turned(
        row_ptr + h * D, of_query, g[0], g[1], gains_ptr, cos_ptr + angles, sin_ptr + angles, key_eps,
        D, LANES, NORM, EVERY,
    ) * scale  # fmt: skip
    key_ptr = row_ptr + (HEADS + h // GROUPS) * D
    b_new = turned(
        key_ptr, of_key, g[2], g[3], gains_ptr + D, cos_ptr + angles, sin_ptr + angles, key_eps, D, LANES, NORM, EVERY
    )  # fmt: skip
    b_new = b_new.to(k_ptr.dtype.element_ty)
    b_value = tl.load(key_ptr + KV * D + d, mask=live, other=0.0)
    writes = live & (split == 0) & (h % GROUPS == 0)
    if MIXED == "values":
        tl.store(anchor_ptr + m * (KV * D) + channel, b_value, mask=writes & (layer == 0))
    if MIXED != "none":
        b_value = mixed(b_value, of_value, g[4], g[5])
    b_value = b_value.to(v_ptr.dtype.element_ty)

    # the slots before the new token
    b_top = tl.full([SLOTS], -float("inf"), tl.float32)
    b_total = tl.zeros([SLOTS], tl.float32)
    b_o = tl.zeros([SLOTS, LANES], tl.float32)
    b_top, b_total, b_o = _attend_tile(b_k, b_v, b_q, b_top, b_total, b_o, first, end, SLOTS)
    for start in range(first + SLOTS, end, SLOTS):
        b_more = _slots(k_ptr, cell, start, end, stride_ks, live, LANES, SLOTS)
        b_worth = _slots(v_ptr, cell, start, end, stride_ks, live, LANES, SLOTS)
        b_top, b_total, b_o = _attend_tile(b_more, b_worth, b_q, b_top, b_total, b_o, start, end, SLOTS)
    # the new token, as the cache rounds it
    z = tl.where(split == 0, tl.sum(b_new.to(tl.float32) * b_q, 0), -float("inf"))

    # y = Σ softmax(z) v and its lse
    highest = tl.maximum(tl.max(b_top, 0), z)
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    b_e, e = tl.exp(b_top - safe), tl.exp(z - safe)
    whole = tl.sum(b_total * b_e, 0) + e
    b_y = tl.sum(b_o * b_e[:, None], 0) + e * b_value.to(tl.float32)
    none = whole == 0.0
    divisor = tl.where(none, 1.0, whole)
    tl.store(part_ptr + item * D + d, b_y / divisor, mask=live)
    tl.store(lse_ptr + item, tl.where(none, -float("inf"), safe + tl.log(divisor)))
    # into the cache
    tl.store(k_ptr + cell + position * stride_ks + d, b_new, mask=writes)
    tl.store(v_ptr + cell + position * stride_ks + d, b_value, mask=writes)


@triton.jit
def _shares(
    part_ptr, lse_ptr, m, piece: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    LINE: tl.constexpr,
):  # fmt: skip
    c = piece * LINE + tl.arange(0, LINE)
    live, first = c < HEADS * D, (m * HEADS + c // D) * SPLITS
    b_lse, b_part = (), ()
    for s in tl.static_range(SPLITS):
        b_lse = b_lse + (tl.load(lse_ptr + first + s, mask=live, other=0.0),)
        b_part = b_part + (tl.load(part_ptr + (first + s) * D + c % D, mask=live, other=0.0),)
    return b_lse, b_part


@triton.jit
def _whole(b_lse, b_part, SPLITS: tl.constexpr):
    b_top = b_lse[0]
    for s in tl.static_range(1, SPLITS):
        b_top = tl.maximum(b_top, b_lse[s])
    b_total = tl.exp(b_lse[0] - b_top)
    b_y = b_total * b_part[0]
    for s in tl.static_range(1, SPLITS):
        b_e = tl.exp(b_lse[s] - b_top)
        b_total += b_e
        b_y += b_e * b_part[s]
    return b_y / b_total


@triton.jit
def _merged(
    part_ptr, lse_ptr, m, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """The heads' outputs of row m from their shares, as lines [LINE]."""
    LINES: tl.constexpr = (HEADS * D + LINE - 1) // LINE
    shares, b_x = (), ()
    for piece in tl.static_range(LINES):
        shares = shares + (_shares(part_ptr, lse_ptr, m, piece, HEADS, D, SPLITS, LINE),)
    for piece in tl.static_range(LINES):
        b_x = b_x + (_whole(shares[piece][0], shares[piece][1], SPLITS),)
    return b_x


@triton.jit(do_not_specialize=["first", "last"])
def layers_kernel(
    table_ptr, vectors_ptr, biases_ptr, gains_ptr, cos_ptr, sin_ptr, mixing_ptr, lengths_ptr, y_ptr, state_ptr,
    ready_ptr, projected_ptr, anchor_ptr, part_ptr, lse_ptr, hidden_ptr, normed_ptr, count_ptr, first, last,
    eps, key_eps, scale, per_root, stride_kb, stride_ks, stride_kh,
    M: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    GATE: tl.constexpr, E: tl.constexpr, LANES_E: tl.constexpr, HIDDEN: tl.constexpr, KIND: tl.constexpr,
    NORM: tl.constexpr, MIXED: tl.constexpr, JUNCTION: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    COMPETITIVE: tl.constexpr, WIDE: tl.constexpr, WORK: tl.constexpr, SPARE: tl.constexpr, ROWS: tl.constexpr,
    LINE: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """Layers `first` to `last`, then the final norm; or of these the phase ONLY.

    GATE is the width of a head's gate. E is that of the network that makes γ, whose W1 is the last entry of the table.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    T: tl.constexpr = y_ptr.dtype.element_ty
    HEADED: tl.constexpr = (HEADS + 2 * KV) * D + HEADS * GATE
    ENTRIES: tl.constexpr = 7 if E else 6
    ITEMS: tl.constexpr = M * HEADS * SPLITS
    GATED: tl.constexpr = KIND == "swiglu" or KIND == "glu"
    LINES: tl.constexpr = (C + LINE - 1) // LINE
    project = tl.load(table_ptr + first * ENTRIES, mask=first < last, other=0)
    for layer in range(first, last):
        reached = (layer - first) * (PHASES * programs)
        entries = table_ptr + layer * ENTRIES
        k_ptr, v_ptr = tensor(entries, 4, T), tensor(entries, 5, T)
        out_ptr, up_ptr, down_ptr = tensor(entries, 1, T), tensor(entries, 2, T), tensor(entries, 3, T)
        project_ptr = tl.multiple_of(project.to(tl.pointer_type(T)), 16)
        project = tl.load(entries + ENTRIES, mask=layer + 1 < last, other=0)  # of the next layer, in time

        # project: Q, K, V and the gate = W RMS(h), and of γ's network GELU(W1 RMS(h))
        if ONLY == ALL or ONLY == 0:
            program = _again(tl.program_id(0), ONLY)
            b_w = _held(project_ptr, program, HEADED, C, WORK, ROWS, LINE)
            if E:
                b_u = _held(tensor(entries, 6, T), program, E, C, WORK, ROWS, LINE)
            _wait(count_ptr, reached, ONLY)
            if program < WORK:
                for m in range(M):
                    b_x = enter(
                        y_ptr, state_ptr, ready_ptr, vectors_ptr, m, 2 * layer, eps, key_eps, per_root,
                        M, C, JUNCTION, N, SIZE, SPARE, LINE,
                    )  # fmt: skip
                    for t in tl.static_range(((HEADED + WORK - 1) // WORK + ROWS - 1) // ROWS):
                        b_y = _products(b_w, b_x, t, LINES)
                        _store_rows(projected_ptr + m * (HEADED + E), b_y, program, t, HEADED, WORK, ROWS)
                    for t in tl.static_range(((E + WORK - 1) // WORK + ROWS - 1) // ROWS):
                        b_y = activation(_products(b_u, b_x, t, LINES), "gelu")
                        _store_rows(projected_ptr + m * (HEADED + E) + HEADED, b_y, program, t, E, WORK, ROWS)
            else:
                write(y_ptr, state_ptr, ready_ptr, program - WORK, 2 * layer, M, C, JUNCTION, N, SIZE, SPARE, WIDE)
            _arrive(count_ptr, ONLY)

        # attend, each head in SPLITS shares
        if ONLY == ALL or ONLY == 1:
            program = _again(tl.program_id(0), ONLY)
            if program < WORK:
                for turn in range((ITEMS + WORK - 1) // WORK):
                    item = turn * WORK + program
                    if item < ITEMS:
                        _attend(
                            k_ptr, v_ptr, projected_ptr, gains_ptr + layer * (2 * D), cos_ptr, sin_ptr, lengths_ptr,
                            anchor_ptr, mixing_ptr, part_ptr, lse_ptr, count_ptr, reached + programs, layer, item,
                            key_eps, scale, stride_kb, stride_ks, stride_kh, HEADS, KV, D, LANES, NORM,
                            GATE, E, LANES_E, MIXED, SPLITS, SLOTS, ONLY,
                        )  # fmt: skip
                    else:
                        _wait(count_ptr, reached + programs, ONLY)
            else:
                _wait(count_ptr, reached + programs, ONLY)
                prepare(
                    state_ptr, ready_ptr, vectors_ptr, biases_ptr, program - WORK, 2 * layer + 1, key_eps, per_root,
                    M, C, JUNCTION, N, SIZE, COMPETITIVE, SPARE, WIDE,
                )  # fmt: skip
            _arrive(count_ptr, ONLY)

        # out: y = W of the merged heads, which are gated first
        if ONLY == ALL or ONLY == 2:
            program = _again(tl.program_id(0), ONLY)
            b_w = _held(out_ptr, program, C, HEADS * D, WORK, ROWS, LINE)
            parts = ()
            if GATE:
                for r in tl.static_range(M):
                    of_gate = gate_parts(
                        projected_ptr, anchor_ptr, mixing_ptr, layer, _again(program * 0 + r, ONLY),
                        HEADS, (HEADS + 2 * KV) * D, D, GATE, E, LANES_E, MIXED == "heads", LINE,
                    )  # fmt: skip
                    parts = parts + (of_gate,)
            _wait(count_ptr, reached + 2 * programs, ONLY)
            if program < WORK:
                for m in range(M):
                    b_x = _merged(part_ptr, lse_ptr, m, HEADS, D, SPLITS, LINE)
                    if GATE:
                        b_x = gated(b_x, parts, m, M, E, MIXED == "heads", (HEADS * D + LINE - 1) // LINE)
                    for t in tl.static_range(((C + WORK - 1) // WORK + ROWS - 1) // ROWS):
                        b_y = _products(b_w, b_x, t, (HEADS * D + LINE - 1) // LINE)
                        _store_rows(y_ptr + m * C, b_y, program, t, C, WORK, ROWS)
            _arrive(count_ptr, ONLY)

        # up: act(W RMS(h)), gated or not
        if ONLY == ALL or ONLY == 3:
            program = _again(tl.program_id(0), ONLY)
            b_w = _held(up_ptr, program, HIDDEN, C, WORK, ROWS, LINE)
            if GATED:
                b_u = _held(up_ptr + HIDDEN * C, program, HIDDEN, C, WORK, ROWS, LINE)
            _wait(count_ptr, reached + 3 * programs, ONLY)
            if program < WORK:
                for m in range(M):
                    b_x = enter(
                        y_ptr, state_ptr, ready_ptr, vectors_ptr, m, 2 * layer + 1, eps, key_eps, per_root,
                        M, C, JUNCTION, N, SIZE, SPARE, LINE,
                    )  # fmt: skip
                    for t in tl.static_range(((HIDDEN + WORK - 1) // WORK + ROWS - 1) // ROWS):
                        b_y = activation(_products(b_w, b_x, t, LINES), KIND)
                        if GATED:
                            b_y = b_y * _products(b_u, b_x, t, LINES)
                        _store_rows(hidden_ptr + m * HIDDEN, b_y, program, t, HIDDEN, WORK, ROWS)
            else:
                write(y_ptr, state_ptr, ready_ptr, program - WORK, 2 * layer + 1, M, C, JUNCTION, N, SIZE, SPARE, WIDE)
            _arrive(count_ptr, ONLY)

        # down: y = W of the hidden state
        if ONLY == ALL or ONLY == 4:
            program = _again(tl.program_id(0), ONLY)
            b_w = _held(down_ptr, program, C, HIDDEN, WORK, ROWS, LINE)
            _wait(count_ptr, reached + 4 * programs, ONLY)
            if program < WORK:
                for m in range(M):
                    b_x = _row(hidden_ptr + m * HIDDEN, HIDDEN, ROWS, LINE)
                    for t in tl.static_range(((C + WORK - 1) // WORK + ROWS - 1) // ROWS):
                        b_y = _products(b_w, b_x, t, (HIDDEN + LINE - 1) // LINE)
                        _store_rows(y_ptr + m * C, b_y, program, t, C, WORK, ROWS)
            else:
                prepare(
                    state_ptr, ready_ptr, vectors_ptr, biases_ptr, program - WORK, 2 * layer + 2, key_eps, per_root,
                    M, C, JUNCTION, N, SIZE, COMPETITIVE, SPARE, WIDE,
                )  # fmt: skip
            _arrive(count_ptr, ONLY)

    # the final norm, a row to a program
    if ONLY == ALL or ONLY == 5:
        _wait(count_ptr, (last - first) * (PHASES * programs), ONLY)
        for m in range(M):
            if program == m:
                b_x = enter(
                    y_ptr, state_ptr, ready_ptr, vectors_ptr, m, 2 * last, eps, key_eps, per_root,
                    M, C, JUNCTION, N, SIZE, SPARE, LINE,
                )  # fmt: skip
                for piece in tl.static_range(LINES):
                    c = piece * LINE + tl.arange(0, LINE)
                    tl.store(normed_ptr + m * C + c, b_x[piece].to(T), mask=c < C)
    # the last program to get here sets the counts back for the next launch
    if ONLY == ALL:
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + 1, 1, sem="acq_rel") == programs - 1:
            tl.store(count_ptr, 0)
            tl.store(count_ptr + 1, 0)
