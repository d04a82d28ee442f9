"""Start-up time of a command: heavy modules are imported only when needed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
# One process makes all checks, because importing torch takes most of its time.
SCRIPT = """
import importlib, sys
import torch
from residua.cli.main import VERBS

for module, _ in VERBS.values():
    importlib.import_module(module)
from residua.config.run import RunConfig
from residua.data.loader import Batch
import residua.diagnose, residua.evaluate, residua.export, residua.generate, residua.quantize, residua.train.trainer
from residua.train.start import starting_model
from residua.train.step import arithmetic, build_step

small = ["model.layers=1", "model.width=32", "model.attention.heads=1", "train.device=cpu", "model.ffn.hidden=32"]
config = RunConfig.find("tiny").override([*small, "model.topology=full_attnres"])
experts = RunConfig.find("tiny").override([*small, "model.ffn={kind='moe', hidden=32, experts=2, top_k=2}"])
tokens = torch.zeros(1, 8, dtype=torch.long)
for run in (config, experts):
    with arithmetic(run.train):
        step = build_step(starting_model(run), run.train, torch.device("cpu"))
        step([Batch(tokens, tokens)], 1.0)
        step.totals()
assert "torch._dynamo" not in sys.modules, "dynamo was imported, which takes seconds"

import torch._dynamo
from torch._dynamo.trace_rules import is_callable_allowed
from residua.ops._runtime import numeric, tracing
from residua.ops.depth_attention import autograd

assert not tracing._waiting
assert is_callable_allowed(autograd.read) and is_callable_allowed(autograd.make_handles)
ours, theirs = numeric.constant(lambda: True), torch.compiler.assume_constant_result(lambda: True)
assert vars(ours) == vars(theirs)
"""


def test_eager_training_imports_no_dynamo():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
