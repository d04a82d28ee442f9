"""Matched-budget, multi-seed comparisons: does a depth architecture pay on this text, per step and per second?"""

from residua.study.config import StudyConfig

__all__ = ["StudyConfig"]
