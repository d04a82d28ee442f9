"""The version of Residua: `residua.__version__`, the wheel and exported folders read it here."""

__version__ = "0.2.0"

MATHEMATICS = 1
"""Raised when a change alters what a run of the same configuration computes beyond rounding; saved results hold it.

A change of configurations that no study would choose is in the changelog only: a warm-up that reaches into the decay.
"""
