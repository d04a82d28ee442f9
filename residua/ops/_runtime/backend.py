"""Which implementation of an operator runs: the plain PyTorch reference or a fused kernel.

Every operator is declared once with its reference, which defines it, and, where one exists, a fused path with a
predicate for the inputs that it supports. `auto` uses the fused path wherever its predicate holds. `reference` never
does. `triton` always does, and refuses unsupported operators and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

CHOICES = ("auto", "reference", "triton")
_choice = "auto"


class backend:
    """Choose the implementation of every operator, from here on or for the duration of a `with` block.

    residua.ops.backend("reference")            # from here on
    with residua.ops.backend("triton"): ...     # inside the block only
    """

    def __init__(self, choice: str) -> None:
        global _choice
        if choice not in CHOICES:
            near = get_close_matches(choice, CHOICES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(CHOICES)}."
            raise ValueError(f"backend {choice!r} does not exist: {hint}")
        self._previous = _choice
        _choice = choice

    def __enter__(self) -> backend:
        return self

    def __exit__(self, *_: object) -> None:
        global _choice
        _choice = self._previous


def chosen_backend() -> str:
    """The current choice: `auto`, `reference` or `triton`."""
    return _choice


class Operator(Generic[P, R]):
    """The declaration of one operator. Calling it runs the reference or the fused path, as `backend` selects.

    `cases` makes example inputs from a `Draw` (`cases.py`). `serves(*args, **kwargs)` returns whether the fused path
    supports these inputs. `compile_seconds` is the compilation time of its kernels, if that is long.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        cases: Callable[[Any], Iterable[Any]] = lambda draw: (),
        fused: Callable[P, R] | None = None,
        serves: Callable[..., bool] = lambda *args, **kwargs: False,
        *,
        compile_seconds: int = 0,
    ) -> None:
        self.reference, self.cases, self.compile_seconds = reference, cases, compile_seconds
        self.fused, self._serves = fused, serves
        self.folder = reference.__module__.rpartition(".")[0]
        self.__name__ = reference.__name__
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference  # its signature and source, for `inspect`, `help` and editors

    def __get__(self, instance: object, owner: type | None = None) -> Operator[P, R]:
        """Return itself, even as a class attribute. This method makes `help` describe an operator as a function."""
        return self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.fused is not None and self.fuses(*args, **kwargs):
            return self.fused(*args, **kwargs)
        if _choice == "triton":
            raise ValueError(
                f"backend 'triton' has no fused kernel of {self.__name__} for these inputs: use backend('auto') or "
                "backend('reference')."
            )
        return self.reference(*args, **kwargs)

    def fuses(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether a call with these inputs takes the fused path."""
        return _choice != "reference" and self._serves(*args, **kwargs)
