"""An exported model is the model: in transformers, by the folder's own code, for every two parts that can meet."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import residua
from residua.storage.hugging_face import exported_name
from tests.export.exported import VOCABULARY, bytes_config, greedy, in_transformers, trained_like, write
from tests.model.combinations import config_of, fits, name_of
from tests.model.pairwise import covering_array
from tests.nightly import covering

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("copied_code")]
pytest.importorskip("transformers")

# One of each class: options that only choose a number or a function are left to tests/model.
CHOSEN = {
    "topology": "additive, parallel, full_attnres, block_attnres, multi_gate, highway, hyper, mhc, mhc_lite, dense",
    "anchors": "none, resformer, lime, depth_attention, cla, svformer, nuresformer, exoformer, exoformer dynamic",
    "norm": "rmsnorm, layernorm, unit_rmsnorm, preaffine, gatednorm, dyt, gated_dyt",
    "attention": "gated, grouped, no qk-norm, sink, linear, hybrid gated, latent, hybrid kimi",
    "ffn": "swiglu, relu2, moe, moe plain",
    "head": "tied, untied",
}
KEPT = {factor: names.split(", ") for factor, names in CHOSEN.items()}
ROWS = covering_array(KEPT, fits)
NEW = 6


def gradients(model: torch.nn.Module, logits: Tensor) -> dict[str, Tensor]:
    """Of a loss that weighs every logit differently, by parameter name."""
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (logits * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("row", covering(ROWS), ids=name_of)
@torch.no_grad()
def test_exported_model_gives_the_same_logits_gradients_and_text(row, tmp_path: Path):
    model = trained_like(bytes_config(config_of(row)))
    folder = write(model, tmp_path / "exported")
    exported = in_transformers(folder)
    assert type(exported.model.decoder).__module__.startswith("transformers_modules")
    tokens = torch.randint(VOCABULARY, (2, 9))
    torch.testing.assert_close(exported(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    with torch.enable_grad():
        expected, found = gradients(model, model(tokens)), gradients(exported, exported(tokens).logits)
    for name, gradient in expected.items():
        error = (found[exported_name(name)] - gradient).abs().max()
        assert error <= 1e-4 * gradient.abs().max() + 1e-6, name

    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    written = exported.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    assert torch.equal(written, greedy(model, tokens, NEW, VOCABULARY - 1))
    # the second row is shorter: padded on the left, and the same text as alone
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    padded = exported.generate(tokens.where(mask.bool(), 0), attention_mask=mask, **settings)
    assert torch.equal(padded[1, 4:], greedy(model, tokens[1:, 4:], NEW, VOCABULARY - 1)[0])
    assert torch.equal(padded[0], written[0])

    again = residua.load(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
