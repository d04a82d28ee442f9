"""The error class of Residua: a person's mistake, told in one sentence."""

from __future__ import annotations


class UserError(ValueError):
    """A person's mistake: one sentence that names the file, key or option, the value found, and the fix.

    The command line prints the sentence alone. Every other exception is a bug, ours or a plugin's, and keeps its
    traceback.
    """
