"""Runs and exports written by old versions open with `residua.load` (old/README.md says how they were made)."""

from pathlib import Path

import pytest
import torch

import residua

OLD = Path(__file__).parent / "old"
TOKENS = [(37 * place + 11) % 256 for place in range(24)]
WORDS = [0, 32, 101, 116, 255, 256]
LOGITS = {
    "0.1.0": [3.7299854, -3.6931760, -3.4082704, -2.9820578, 3.5958983, 3.7636163],
    "0.2.0.dev": [3.6728700, -3.6631136, -3.3628396, -2.8128422, 3.5549675, 3.7185396],
}
"""Logits of `WORDS` after `TOKENS`, by the code that wrote the folder."""


@pytest.mark.parametrize("folder", ["run", "export"])
@pytest.mark.parametrize("version", LOGITS)
def test_old_folder_opens_with_the_logits_of_its_version(version: str, folder: str) -> None:
    model = residua.load(OLD / version / folder).double().eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS]))[0, -1, WORDS]
    torch.testing.assert_close(logits, torch.tensor(LOGITS[version], dtype=torch.float64), rtol=0, atol=1e-5)
