"""An environment without Residua opens an exported folder and writes the same text."""

import sys
from importlib.util import find_spec

import pytest
import torch

import residua
from residua.data.tokenizer import Tokenizer
from tests.export.exported import bytes_config, greedy, trained_like, write
from tests.model.small import small

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")

CONFIGS = {
    "attnres": {
        "topology": {"kind": "block_attnres", "sublayers_per_block": 2},
        "anchors": {"kind": "exoformer", "pathways": ["q", "k", "v"]},
        "norm": {"kind": "gatednorm", "rank": 4},
    },
    "mgr": {
        "layers": 2,
        "topology": {"kind": "multi_gate", "streams": 2},
        "attention": {
            "kind": "hybrid",
            "softmax_every": 2,
            "softmax": {"heads": 2},
            "linear": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8},
        },
    },
}
PROMPTS = ["The depth axis", "of"]

SCRIPT = """
import json, sys
for name in ("residua", "pydantic", "typer", "tomli_w"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} is installed here")
for name in ("torchao", "scipy", "sklearn"):  # transformers would import them, for a second
    sys.modules[name] = None
sys.path.insert(0, "clones")  # next to a clone, Python imports its folder, here clones/residua, as an empty module
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
written = {}
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model.model.decoder).__module__.startswith("transformers_modules"), type(model.model.decoder)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    new = ids[:, inputs["input_ids"].shape[1]:]
    written[folder] = [tokenizer.decode(row, skip_special_tokens=True) for row in new]
    with torch.no_grad():
        written[folder].append(model(torch.arange(9)[None]).logits[0, -1].tolist())
print(json.dumps(written))
"""


def test_export_generates_the_same_text_without_residua(run_without_residua, tmp_path):
    models = {name: trained_like(bytes_config(small(**tables))) for name, tables in CONFIGS.items()}
    folders = {name: write(model, tmp_path / name) for name, model in models.items()}
    (tmp_path / "clones" / "residua").mkdir(parents=True)
    (tmp_path / "script.py").write_text(f"PROMPTS = {PROMPTS}\n{SCRIPT}")
    found = run_without_residua(tmp_path / "script.py", *folders.values(), folder=tmp_path)
    for name, model in models.items():
        *texts, logits = found[str(folders[name])]
        assert texts == [continued(model, prompt) for prompt in PROMPTS]
        torch.testing.assert_close(torch.tensor(logits), model(torch.arange(9)[None])[0, -1], rtol=1e-5, atol=1e-5)


def continued(model: residua.Decoder, prompt: str) -> str:
    """The greedy continuation of a prompt, computed by Residua without a cache."""
    tokenizer = Tokenizer.bytes()
    given = tokenizer.encode(prompt)
    new = greedy(model, torch.tensor([given]), 8)[0, len(given) :].tolist()
    ended = new.index(tokenizer.end_of_text) if tokenizer.end_of_text in new else len(new)
    return tokenizer.decode(new[:ended])


def test_residua_is_importable_here():
    """Without this, the other test would pass even if Residua could not be imported anywhere."""
    assert find_spec("residua") is not None and sys.executable
