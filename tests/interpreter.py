"""Makes Triton's interpreter twice as fast: it spends half of its time on patching what is patched already."""

from __future__ import annotations

import inspect
from typing import Any


def patch_once() -> None:
    """Leave `triton.language` as it is for functions that a kernel calls: the kernel's launch has patched it."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang

    def patch_lang(function: Any) -> Any:
        modules = [m for m in function.__globals__.values() if inspect.ismodule(m) and m in (language, language.core)]
        if modules and not any(language.core.is_builtin(m.load) for m in modules):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patch_lang
