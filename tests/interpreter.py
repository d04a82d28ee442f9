"""Makes Triton's interpreter several times as fast: it spends most time on results that it already has or drops."""

import dataclasses
import functools
import inspect
import math
from typing import Any

import numpy as np


def patch_once() -> None:
    """Change the interpreter for this process; results stay the same except for the order of sums."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    _patch_language_per_launch(language, interpreter)
    _remember_types(language.core, interpreter)
    interpreter.ReduceOps.generic_reduce = _reduce_in_pairs
    # it computes the range of every integer, and checks it only in debug mode
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_language_per_launch(language: Any, interpreter: Any) -> None:
    """Do not patch `triton.language` again for functions that a kernel calls: the kernel's launch has patched it."""
    patch = interpreter._patch_lang

    @functools.cache
    def modules_of(function: Any) -> list[Any]:
        return [m for m in function.__globals__.values() if inspect.ismodule(m) and m in (language, language.core)]

    def patch_lang(function: Any) -> Any:
        modules = modules_of(function)
        if modules and not any(language.core.is_builtin(m.load) for m in modules):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patch_lang


def _remember_types(core: Any, interpreter: Any) -> None:
    """Check a block's shape once, not for every value of that shape; keep the table of numpy's types."""
    numpy_type = functools.cache(interpreter._get_np_dtype)
    scalar_shape = (core.constexpr(1), core.tuple([]))

    @functools.lru_cache(None, typed=True)
    def block_shape(*sizes: int) -> tuple[Any, int, str]:
        shape = core.tuple(sizes)
        return shape, core.validate_block_shape(shape), str(shape)

    @functools.cache
    def tensor_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(s) for s in sizes])

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, text = block_shape(*sizes)
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = tensor_shape(tuple(type.shape.values)) if type.is_block() else scalar_shape

    def get_np_dtype(type: Any) -> Any:
        scalar = type.scalar
        return np.dtype(np.uint64) if scalar.is_ptr() else numpy_type(scalar)

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = get_np_dtype


def _reduce_in_pairs(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """`tl.reduce`: neighbours are combined, all pairs at a time, as the interpreter does one element at a time."""
    rank = inputs[0].handle.data.ndim
    parts, axis = self.unravel(inputs, self.axis)
    axis %= parts[0].handle.data.ndim
    pairs = [(slice(None),) * axis + (slice(start, None, 2),) for start in (0, 1)]
    while parts[0].handle.data.shape[axis] > 1:
        halves = [self.to_tensor(part.handle.data[pair], part.dtype) for pair in pairs for part in parts]
        both = self.combine_fn.fn(*halves)
        both = both if isinstance(both, tuple) else (both,)
        parts = [self.to_tensor(new.handle.data, part.dtype) for new, part in zip(both, parts, strict=True)]
    reduced = [part.handle.data.squeeze(axis) for part in parts]
    if self.keep_dims:
        kept = axis if self.axis is not None else tuple(range(rank))
        reduced = [np.expand_dims(data, kept) for data in reduced]
    return [self.to_tensor(data, part.dtype) for data, part in zip(reduced, parts, strict=True)]
