"""A small text, and changes that make every entry a matter of seconds."""

from tests.study.conftest import dataset as dataset

QUICK = (
    "model.context=32", "train.device=cpu", "train.steps=4", "train.micro_batch=2", "train.accumulate=1",
    "train.schedule.warmup=1", "train.log_every=1", "train.validate_every=2", "train.save_every=4",
    "data.validation_tokens=256",
)  # fmt: skip
"""Overrides that do not change the depth and the rows of an entry."""
