"""The size that docs/diagnose.md promises: 32 sequences of 2,048 tokens through 12 layers of width 768."""

import time

import pytest
import torch

import residua
from residua.diagnose import diagnose_model
from residua.diagnose.native import NativeSubject
from tests.diagnose.planted import sample_of

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
SEQUENCES, LENGTH = 32, 2048


@pytest.mark.parametrize("preset", ["mgr-s-prenorm", "mgr-s-full", "mgr-s-competitive4"])
def test_12_by_768_model_takes_under_a_minute_and_2_gib(preset: str) -> None:
    config = residua.ModelConfig.preset(preset).override([f"context={LENGTH}"])
    model = residua.build(config).cuda()
    text = sample_of(torch.randint(config.vocab_size, (SEQUENCES, LENGTH + 1)))
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.monotonic()
    diagnose_model(NativeSubject(model, preset), text)
    seconds, beyond = time.monotonic() - start, (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"{preset}: {seconds:.1f} s, {beyond:.2f} GiB beyond the model")
    assert seconds < 60 and beyond < 2
