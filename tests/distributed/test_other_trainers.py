"""Two processes of DDP and FSDP2 train an export, and a plain GPT with our modules, as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import other_trainers
from tests.distributed.launch import launch
from tests.distributed.other_trainers import batch, cases, train
from tests.export.exported import bytes_config, trained_like, write
from tests.model.combinations import config_of

pytestmark = pytest.mark.slow
ROW = {"topology": "multi_gate", "anchors": "exoformer dynamic", "norm": "gatednorm", "attention": "gated"}


@pytest.fixture(scope="module", params=["gpt", pytest.param("export", marks=pytest.mark.nightly)])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, Tensor]], Path]:
    """The result of each case on one process, and the folder with the weights of two."""
    home, export = tmp_path_factory.mktemp("trainers"), None
    if request.param == "export":
        pytest.importorskip("transformers")
        export = write(trained_like(bytes_config(config_of(ROW | {"ffn": "swiglu", "head": "tied"}))), home / "export")
    launch(2, other_trainers.__name__, export, home)
    return {name: train(case, case.model, batch()) for name, case in cases(export)}, home


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_train_like_one(way: str, trained: tuple[dict[str, dict[str, Tensor]], Path]) -> None:
    alone, home = trained
    for name, expected in alone.items():
        together = load_file(home / f"{name}-{way}.safetensors")
        assert any("topology" in key for key in expected)
        assert expected["losses"][-1] < expected["losses"][0]
        torch.testing.assert_close(together, expected, rtol=1e-6, atol=1e-9)
