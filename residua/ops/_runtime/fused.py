"""The former name of `triton_support`."""

from residua.ops._runtime.triton_support import DTYPES, INSTALLED, INTERPRETED, multiprocessors, shared_memory
from residua.ops._runtime.triton_support import supports as serves

__all__ = ["DTYPES", "INSTALLED", "INTERPRETED", "multiprocessors", "serves", "shared_memory"]
