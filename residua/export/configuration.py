"""The configuration of a model exported from Residua, for Hugging Face transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig


class ResiduaConfig(PreTrainedConfig):
    """`residua` holds the whole configuration in Residua's own tables; other keys of config.json repeat values that
    other libraries look for.

    `implementation` selects the code to run: `library` is the installed Residua, which has kernels; `file` is the code
    next to this file; `auto` is the library if it is installed, else the file.
    """

    model_type = "residua"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(self, residua: dict[str, Any] | None = None, implementation: str = "auto", **kwargs: Any) -> None:
        self.residua = residua
        self.implementation = implementation
        super().__init__(**kwargs)
