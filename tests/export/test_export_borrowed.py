"""Parts of imported models are exported with their own code: windows, biases, positions, norms, experts."""

from pathlib import Path

import pytest
import torch

import residua
from residua.data.tokenizer import Tokenizer
from residua.export.folder import write_folder
from tests.export.exported import greedy, in_transformers
from tests.model.small import small
from tests.model.test_borrowed_parts import LONG, MODELS, SOFTMAX
from tests.nightly import only_nightly

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

WINDOWS = {"window": 2, "window_layers": [1], "local_rope_theta": 100.0, "rope_scaling": LONG}
CASES = MODELS | {
    "longrope": {"attention": SOFTMAX | {"rope_scaling": LONG}},
    "raw weights of experts": {"ffn": {"kind": "moe", "hidden": 8, "experts": 4, "top_k": 2, "normalize": False}},
    "one expert": {"ffn": {"kind": "moe", "hidden": 8, "experts": 4, "top_k": 1}},
    "eps of the sum": {"topology": {"kind": "multi_gate", "streams": 2}, "reader_eps": "sum"},
    "most at once": {
        "attention": SOFTMAX | WINDOWS | {"bias": "all", "qk_norm": "rms_all", "qk_eps": 1e-5},
        "ffn": {"kind": "geglu", "hidden": 24, "bias": True},
        "placement": "both",
        "embed_scale": 4.0,
        "topology": {"kind": "multi_gate", "streams": 2},
        "reader_eps": "sum",
    },
}


@pytest.mark.parametrize("name", only_nightly(CASES, ["most at once"]))
def test_the_exported_code_generates_like_the_model(name: str, tmp_path: Path) -> None:
    model = residua.build(small(**CASES[name] | {"vocab_size": 300})).eval()
    difference = write_folder(model, Tokenizer.bytes(), tmp_path / "out")
    assert difference is not None and difference < 1e-5
    assert residua.load(tmp_path / "out").config == model.config
    transformers.logging.disable_progress_bar()
    tokens = torch.arange(10).view(2, 5)
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(in_transformers(tmp_path / "out").generate(tokens, **settings), greedy(model, tokens, 3))
