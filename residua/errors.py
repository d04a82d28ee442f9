"""The error class of Residua: a person's mistake, told in one sentence."""

from __future__ import annotations

TRACEBACK = "RESIDUA_TRACEBACK"
"""The environment variable that shows the traceback of a person's mistake too, as `residua --traceback` does."""


class UserError(ValueError):
    """A person's mistake: one sentence that names the file, key or option, the value found, and the fix.

    The command line prints the sentence alone. Every other exception is a bug, ours or a plugin's, and keeps its
    traceback (`residua.report.failure`).
    """
