"""Recipes: a scheme, with or without SmoothQuant, in one word. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from residua.errors import UserError

SCHEME_NAMES = ("fp8", "fp8-group", "fp8-row", "nvfp4", "nvfp4-static")
DEFAULT_ALPHA = 0.5


@dataclass(frozen=True)
class Recipe:
    """A scheme and, with SmoothQuant, its α: `nvfp4`, `nvfp4+smooth` (α = 0.5), `nvfp4+smooth:0.7`."""

    scheme: str
    alpha: float | None = None

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Parse a recipe in the form that `str` writes."""
        name, plus, smoothing = text.strip().partition("+")
        check_scheme(name)
        if not plus:
            return cls(name)
        word, _, number = smoothing.partition(":")
        try:
            alpha = float(number) if number else DEFAULT_ALPHA
        except ValueError:
            alpha = -1.0
        if word != "smooth":
            raise UserError(f"unknown recipe {text!r}: use {name} or {name}+smooth.")
        check_alpha(alpha, text)
        return cls(name, alpha)

    def __str__(self) -> str:
        if self.alpha is None:
            return self.scheme
        return f"{self.scheme}+smooth" + ("" if self.alpha == DEFAULT_ALPHA else f":{self.alpha:g}")


def check_alpha(alpha: float, where: str) -> None:
    """Refuse an exponent outside [0, 1]: 0 moves none of the range from activations to weights, 1 moves all of it."""
    if not 0 <= alpha <= 1:
        raise UserError(f"{where}: SmoothQuant's α must lie between 0 and 1; 0.5 is usual.")


def check_scheme(name: str) -> None:
    """Refuse a scheme that does not exist."""
    if name not in SCHEME_NAMES:
        raise UserError(f"scheme {name!r} does not exist: choose {', '.join(SCHEME_NAMES)}.")
