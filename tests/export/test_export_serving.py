"""An export in a serving engine: a stand-in treats the model like vLLM's and SGLang's Transformers backends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from residua.config.model import ModelConfig
from residua.model.decoder import Decoder
from tests.export.exported import VOCABULARY, bytes_config, in_transformers, made_of, trained_like, write
from tests.model.small import small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("copied_code")]
transformers = pytest.importorskip("transformers")

ROWS = {
    "mgr": ("multi_gate", "exoformer dynamic", "gatednorm", "gated", "swiglu", "tied"),
    "attnres": ("block_attnres", "nuresformer", "rmsnorm", "grouped", "relu2", "untied"),
    "mhc": ("mhc_lite", "resformer", "dyt", "plain", "moe", "tied"),
}
CONFIGS: dict[str, ModelConfig] = {
    **{name: made_of(*row).model_copy(update={"logit_softcap": None}) for name, row in ROWS.items()},
    "scaled embedding": small(layers=2, embed_scale=2.0),
}


class EnginesLinear(nn.Module):
    """A linear map of another class, such as one with weights in low precision."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(old.out_features, old.in_features))
        self.bias = None if old.bias is None else nn.Parameter(torch.empty(old.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class EnginesNorm(nn.Module):
    def __init__(self, old: Any) -> None:
        super().__init__()
        self.eps, self.weight = old.eps, nn.Parameter(torch.empty(old.weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Engine:
    """Builds the model without memory, replaces layers by its own, loads the weights by name, and keeps the keys."""

    def __init__(self, folder: Path) -> None:
        transformers.AttentionInterface.register("engine", self.attend)
        settings = {"trust_remote_code": True, "implementation": "file", "attn_implementation": "engine"}
        config = transformers.AutoConfig.from_pretrained(folder, **settings)
        with torch.device("meta"):
            self.model = transformers.AutoModel.from_config(config, trust_remote_code=True)
        self.replace(self.model)
        self.scale = self.model.get_input_embeddings().embed_scale
        self.model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size))
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))
        weights = load_file(folder / "model.safetensors")
        self.head = weights.pop("lm_head.weight", weights["model.decoder.embed.weight"])
        self.model.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()})
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    module.register_buffer(name, torch.empty(buffer.shape), persistent=False)
                    module.reset_parameters()
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def replace(self, module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, EnginesLinear(child))
            elif type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, EnginesNorm(child))
            else:
                self.replace(child)

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, *, scaling: float, cache: Any) -> Any:
        """Tokens of one request follow earlier ones; the result has a row per token, as in engines."""
        if module.layer_idx in cache:
            k, v = (torch.cat([old, new], 2) for old, new in zip(cache[module.layer_idx], (k, v), strict=True))
        cache[module.layer_idx] = k, v
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True)
        return y.transpose(1, 2).reshape(q.shape[2], -1), None

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """[T, V] of the next tokens [T] of the request."""
        positions = torch.arange(self.length, self.length + len(tokens))
        self.length += len(tokens)
        embedded = self.model.get_input_embeddings()(tokens[None]) * self.scale
        given = {"position_ids": positions[None], "use_cache": False, "return_dict": False, "cache": self.keys}
        return nn.functional.linear(self.model(inputs_embeds=embedded, **given)[0][0], self.head)


EVERY = [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("attnres", "mhc"))) for name in CONFIGS]


@pytest.mark.parametrize("name", EVERY)
def test_engine_that_replaces_layers_keeps_the_logits(name: str, tmp_path: Path) -> None:
    model: Decoder = trained_like(bytes_config(CONFIGS[name]))
    engine = Engine(write(model, tmp_path / "exported"))
    tokens = torch.randint(VOCABULARY, (8,))
    found = torch.cat([engine.logits(part) for part in tokens.split([5, 1, 1, 1])])
    torch.testing.assert_close(found, model(tokens[None])[0], rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, nn.Linear) for module in engine.model.modules())


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"attention": {"kind": "softmax", "heads": 2, "window": 3}},
            "not support learned sinks, windows or capped scores",
        ),
        ({"logit_softcap": 3.0}, "does not support capped logits"),
    ],
)
def test_parts_the_engine_would_ignore_are_refused(tables: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(trained_like(bytes_config(small(layers=1, **tables))), tmp_path / "exported")
    transformers.AttentionInterface.register("engine", lambda *_, **__: None)
    with pytest.raises(ValueError, match=f"{message}: use 'sdpa'"):
        in_transformers(folder, attn_implementation="engine")(torch.zeros(1, 3, dtype=torch.long), use_cache=False)
