"""The same two products for Hopper, with a task for every group of warps; in Gluon, hence not in `kernels.py`:

    one warp        loads the operands of step after step by TMA, as far ahead as there are stages;
    two warpgroups  take 64 rows of a tile each: products, then relu(·)² or the slope, into slots of shared memory;
    two warps       write what is in the slots of a warpgroup, and (backward) first load there the part of a it needs.

It gains 1.1 % of a step at S over the products of `kernels.py` (57.9 for 58.5 ms, medians of 30 steps in turns; one
H200, e2e7122; at L not timed side by side). At L its products take 306 and 321 µs, cuBLAS and a pass 386 and 408
(docs/lab/kernels.md). To time a step without it, before `residua.cli.main.main()` runs
`residua bench step mgr-s-prenorm --micro-batch 32 --accumulate 1`, set `launch.FORWARD, launch.BACKWARD =
launch.FLAT_FORWARD, launch.FLAT_BACKWARD`.

Only the stages synchronise the two warpgroups: while one finishes its tile, the other keeps the tensor cores busy. A
slot is passed on by two barriers: `usable`, free or filled with a part of a; `done`, the result is in it.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan

ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
KEEP_NAN = gl.constexpr(PropagateNan.ALL)


def placed(matrix, block):
    """The matrix as kernels access it by TMA, in blocks of this shape."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)


@gluon.jit
def place(tile, rows, columns, GROUP: gl.constexpr):
    """As `kernels.place`."""
    first = tile // (GROUP * columns) * GROUP
    height = gl.minimum(rows - first, GROUP)
    within = tile % (GROUP * columns)
    return first + within % height, within // height


@gluon.jit
def load_operands(
    x, w, xs, ws, empty, ready, rows, columns,
    K: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, SLOPES: gl.constexpr,
):  # fmt: skip
    """Every step of every tile: both halves of the rows of x, and w."""
    STAGES: gl.constexpr = ws.shape[0]
    DEPTH: gl.constexpr = x.block_type.shape[1]
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = place(tile, rows, columns, GROUP)
        for k in range(0, K, DEPTH):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, 2 * x.block_type.nbytes + w.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [row * ROWS, k], bar, xs.index(2 * stage))
            if SLOPES:
                tma.async_copy_global_to_shared(w, [k, column * COLUMNS], bar, ws.index(stage))
            else:
                tma.async_copy_global_to_shared(w, [column * COLUMNS, k], bar, ws.index(stage))
            tma.async_copy_global_to_shared(x, [row * ROWS + HALF, k], bar, xs.index(2 * stage + 1))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """The next stage; its barriers' phase turns when all have been used."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def split_columns(z, PARTS: gl.constexpr):
    """z in PARTS, from left to right."""
    if PARTS == 1:
        return (z,)
    else:
        left, right = z.reshape(z.shape[0], 2, z.shape[1] // 2).permute(0, 2, 1).split()
        return split_columns(left, PARTS // 2) + split_columns(right, PARTS // 2)


@gluon.jit
def multiply(
    WHO: gl.constexpr, xs, ws, empty, ready, slots, usable, done, rows, columns,
    K: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, SLOPES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of the rows of every tile."""
    STAGES: gl.constexpr = ws.shape[0]
    WIDTH: gl.constexpr = COLUMNS // PARTS
    whole: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    stage, phase, turn = 0, 0, 0
    for _ in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        z = gl.zeros([HALF, COLUMNS], gl.float32, whole)
        before = 0
        for k in range(0, K, xs.shape[2]):
            mbarrier.wait(ready.index(stage), phase)
            w = ws.index(stage)
            if not SLOPES:
                w = w.permute((1, 0))
            z = warpgroup_mma(xs.index(2 * stage + WHO), w, z, use_acc=k > 0, is_async=True)
            # one product stays in flight; the operands of the one before are free
            z = warpgroup_mma_wait(num_outstanding=1, deps=(z,))
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            before = stage
            stage, phase = after(stage, phase, STAGES)
        z = warpgroup_mma_wait(num_outstanding=0, deps=(z,))
        mbarrier.arrive(empty.index(before), count=1)

        pieces = split_columns(z, PARTS)
        for i in gl.static_range(PARTS):
            slot = WHO * SLOTS + turn % SLOTS
            piece = gl.convert_layout(pieces[i], part)
            mbarrier.wait(usable.index(slot), (turn // SLOTS) & 1)
            if SLOPES:
                piece *= 2 * gl.sqrt(slots.index(slot).load(part).to(gl.float32))
            else:
                piece = gl.maximum(piece, 0.0, KEEP_NAN)
                piece *= piece
            slots.index(slot).store(piece.to(slots.dtype))
            fence_async_shared()
            mbarrier.arrive(done.index(slot), count=1)
            turn += 1


@gluon.jit
def write_results(
    WHO: gl.constexpr, a, y, slots, usable, done, rows, columns,
    COLUMNS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, SLOPES: gl.constexpr,
):  # fmt: skip
    """Write one warpgroup's results from their slots, which are then free again."""
    WIDTH: gl.constexpr = COLUMNS // PARTS
    tiles = (rows * columns - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    for n in range(0, SLOTS):
        give(n, tiles, WHO, a, slots, usable, rows, columns, WIDTH, PARTS, SLOTS, GROUP, SLOPES)
    for n in range(0, tiles * PARTS):
        slot = WHO * SLOTS + n % SLOTS
        row, column = part_at(n, rows, columns, WHO, WIDTH, PARTS, GROUP)
        mbarrier.wait(done.index(slot), (n // SLOTS) & 1)
        tma.async_copy_shared_to_global(y, [row, column], slots.index(slot))
        tma.store_wait(0)
        give(n + SLOTS, tiles, WHO, a, slots, usable, rows, columns, WIDTH, PARTS, SLOTS, GROUP, SLOPES)


@gluon.jit
def give(
    n, tiles, WHO: gl.constexpr, a, slots, usable, rows, columns,
    WIDTH: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, SLOPES: gl.constexpr,
):  # fmt: skip
    """The slot of a warpgroup's n-th part, if there is one: free, or with what is there of a."""
    slot = WHO * SLOTS + n % SLOTS
    there = n < tiles * PARTS
    if SLOPES:
        row, column = part_at(n, rows, columns, WHO, WIDTH, PARTS, GROUP)
        mbarrier.expect(usable.index(slot), a.block_type.nbytes, pred=there)
        tma.async_copy_global_to_shared(a, [row, column], usable.index(slot), slots.index(slot), pred=there)
    else:
        mbarrier.arrive(usable.index(slot), count=1, pred=there)


@gluon.jit
def part_at(n, rows, columns, WHO: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr):
    """Where a warpgroup's n-th part is in the result."""
    row, column = place(gl.program_id(0) + n // PARTS * gl.num_programs(0), rows, columns, GROUP)
    return row * ROWS + WHO * HALF, (column * PARTS + n % PARTS) * WIDTH


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def product_kernel(
    x, w, a, y, rows, columns,
    K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
    SLOPES: gl.constexpr,
):  # fmt: skip
    """y = relu(x wᵀ)² with w [N, K], or if SLOPES y = (x w) ⊙ 2√a with w [K, N]; rows × columns tiles."""
    DEPTH: gl.constexpr = x.block_type.shape[1]
    COLUMNS: gl.constexpr = w.block_type.shape[1 if SLOPES else 0]
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, HALF, DEPTH], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, w.block_type.shape[0], w.block_type.shape[1]], w.layout)
    slots = gl.allocate_shared_memory(y.dtype, [2 * SLOTS, HALF, COLUMNS // PARTS], y.layout)
    empty, ready = barriers(STAGES, 2), barriers(STAGES, 1)
    usable, done = barriers(2 * SLOTS, 1), barriers(2 * SLOTS, 1)
    fence_async_shared()

    # literal arguments: in a named tuple, constants would become run-time values
    gl.warp_specialize(
        [
            (multiply, (0, xs, ws, empty, ready, slots, usable, done, rows, columns, K, COLUMNS, PARTS, SLOTS, SLOPES)),
            (multiply, (1, xs, ws, empty, ready, slots, usable, done, rows, columns, K, COLUMNS, PARTS, SLOTS, SLOPES)),
            (load_operands, (x, w, xs, ws, empty, ready, rows, columns, K, COLUMNS, GROUP, SLOPES)),
            (write_results, (0, a, y, slots, usable, done, rows, columns, COLUMNS, PARTS, SLOTS, GROUP, SLOPES)),
            (write_results, (1, a, y, slots, usable, done, rows, columns, COLUMNS, PARTS, SLOTS, GROUP, SLOPES)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
