"""Exports as graphs of PyTorch and of ONNX, for batches and lengths other than the example's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.export.exported import bytes_config, in_transformers, made_of, trained_like, write

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("copied_code")]
pytest.importorskip("transformers")
ROWS = {
    "plain": ("additive", "none", "rmsnorm", "plain", "swiglu", "untied"),
    "mgr": ("multi_gate", "exoformer dynamic", "gatednorm", "gated", "swiglu", "tied"),
}
EXAMPLE, OTHER = torch.randint(250, (2, 9)), torch.randint(250, (3, 14))
DYNAMIC = ({0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=64)},)


class Logits(nn.Module):
    """As in docs/export.md: an output that is one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).logits


@pytest.fixture(params=ROWS)
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> nn.Module:
    model = trained_like(bytes_config(made_of(*ROWS[request.param])))
    return Logits(in_transformers(write(model, tmp_path / "model"))).eval()


@torch.no_grad()
def test_pytorch_export_graph_has_equal_logits(exported: nn.Module) -> None:
    graph = torch.export.export(exported, (EXAMPLE,), dynamic_shapes=DYNAMIC, strict=False).module()
    assert torch.equal(graph(OTHER), exported(OTHER))


@torch.no_grad()
def test_onnx_logits_match_the_export(exported: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="pip install onnxscript onnxruntime")
    runtime = pytest.importorskip("onnxruntime", reason="pip install onnxscript onnxruntime")
    program = torch.onnx.export(exported, (EXAMPLE,), dynamo=True, dynamic_shapes=DYNAMIC, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: OTHER.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), exported(OTHER), rtol=1e-4, atol=1e-5)
