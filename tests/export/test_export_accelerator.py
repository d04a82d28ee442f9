"""On a GPU an exported folder runs Residua's kernels where Residua is installed, and plain PyTorch where it is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.export.exported import VOCABULARY, bytes_config, in_transformers, trained_like, write
from tests.model.small import small

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("copied_code", "without_tf32")]
pytest.importorskip("transformers")

TOPOLOGIES = {
    "additive": {"kind": "additive"},
    "block": {"kind": "block_attnres", "sublayers_per_block": 2},
    "mgr": {"kind": "multi_gate", "streams": 2},
}


@pytest.fixture
def without_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", TOPOLOGIES)
@torch.no_grad()
def test_library_and_copied_code_agree_on_a_gpu(name: str, tmp_path: Path) -> None:
    attention = {"kind": "softmax", "heads": 4, "kv_heads": 2, "head_dim": 16}
    model = trained_like(bytes_config(small(width=64, attention=attention, topology=TOPOLOGIES[name])))
    folder = write(model, tmp_path / name)
    library, alone = (in_transformers(folder, implementation=i, device_map="cuda") for i in ("library", "file"))
    assert type(library.model.decoder).__module__ == "residua.model.decoder"
    tokens = torch.randint(VOCABULARY - 1, (2, 12), device="cuda")
    expected = alone(tokens).logits
    error = (library(tokens).logits - expected).norm() / expected.norm()
    assert error < 1e-4  # sums in another order
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    padded = library(tokens, mask, use_cache=False).logits[1, 5:]
    single = library(tokens[1:, 5:]).logits[0]
    assert (padded - single).norm() / single.norm() < 1e-4
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    written, expected = (model.generate(tokens, **settings) for model in (library, alone))
    assert written.shape == (2, 18) and torch.equal(written, expected)
