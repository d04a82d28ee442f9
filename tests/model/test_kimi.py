"""Kimi Linear's two mixers: their equations, documents, caches, and use by tools."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.config.run import RunConfig
from residua.model import taps
from residua.model.cache import KeyValueCache, Now, RecurrentCache
from residua.model.context import Context
from residua.model.decoder import Decoder, build
from residua.model.equivalence import InitFidelity
from residua.model.latent_attention import LatentAttention
from residua.model.linear_attention import KimiDeltaAttention
from residua.model.moe import SigmoidRouter
from residua.model.retrofit import retrofit
from residua.model.size import measure
from residua.ops.inference import decode_attention
from tests.golden import kimi
from tests.golden.attention import rotary
from tests.golden.compare import agree, close, leaves_of, random, randomise
from tests.model.combinations import ATTENTIONS, DELTA, LATENT, NOWHERE, SEVERAL_READS, TOPOLOGIES
from tests.model.small import in_parts, small, tokens_and_targets

pytestmark = pytest.mark.slow

WIDTH = 16
KIMI = ATTENTIONS["hybrid kimi"]
EXPERTS = {
    "kind": "moe", "hidden": 8, "experts": 5, "top_k": 2, "dense_layers": 1,
    "router": {"kind": "sigmoid_scores", "scale": 2.446},
}  # fmt: skip
VARIATIONS = {
    "rotary": LATENT,
    "no positions": NOWHERE,
    "nothing shared": NOWHERE | {"shared_dim": 0},
    "low-rank queries": LATENT | {"query_rank": 7},
}


def delta(**options: Any) -> KimiDeltaAttention:
    module = KimiDeltaAttention(choices.KimiDelta(**(DELTA | options)), WIDTH, std=0.2, output_std=0.2)
    randomise(module, 0.2)
    return module


def latent(table: dict[str, Any]) -> LatentAttention:
    module = LatentAttention(choices.LatentAttention(**table), 0, WIDTH, std=0.2, output_std=0.2)
    randomise(module, 0.2)
    return module


def run(module: nn.Module, x: Tensor, segments: Tensor | None = None) -> Tensor:
    y, anchors = module(x, (), Context(rotary(torch.arange(x.shape[1]), 4, 10_000.0), segments))
    assert anchors == ()
    return y


def documents_of(segments: Tensor | None) -> list[int] | None:
    return None if segments is None else segments[0].tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_kimi_delta_attention_matches_its_equations(packed: bool) -> None:
    module, x = delta(), random(2, 12, WIDTH)
    segments = (torch.arange(12) >= 7).long().expand(2, -1) if packed else None
    q, k, v = module.project.weight.chunk(3)
    b, f_down, g_down = module.gates.weight.split([2, 8, 8])
    weights = {
        "q": q, "k": k, "v": v, "b": b, "f_down": f_down, "g_down": g_down, "f_up": module.decay.weight,
        "g_up": module.gate.weight, "kernel": module.convolve.weight, "A": module.A_log, "dt": module.dt_bias,
        "gain": module.norm.weight, "out": module.out.weight,
    }  # fmt: skip
    golden = [kimi.kimi_delta_attention(row, weights, heads=2, eps=1e-5, documents=documents_of(segments)) for row in x]
    agree([run(module, x, segments)], [torch.stack(golden)], leaves_of(module, x=x))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", VARIATIONS)
def test_latent_attention_matches_its_equations(name: str, packed: bool) -> None:
    table = VARIATIONS[name]
    module, x = latent(table), random(2, 7, WIDTH)
    segments = (torch.arange(7) >= 3).long().expand(2, -1) if packed else None
    first, c, s = module.project.weight.split([module.rows[0], 10, table["shared_dim"]])
    weights = {"q": first, "c": c, "s": s, "gain": module.norm.weight, "u": module.expand.weight}
    weights["out"] = module.out.weight
    if module.query is not None:
        weights |= {"q_down": first, "q_gain": module.query_norm.weight, "q": module.query.weight}
    how = {"heads": 2, "head_dim": 6, "shared_dim": table["shared_dim"]}
    theta = None if table.get("positions") == "none" else 10_000.0
    golden = [kimi.latent_attention(row, weights, **how, theta=theta, documents=documents_of(segments)) for row in x]
    agree([run(module, x, segments)], [torch.stack(golden)], leaves_of(module, x=x))


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("absorbed", [True, False])
def test_prefill_and_decoding_equal_the_full_forward(name: str, static: bool, absorbed: bool) -> None:
    """Rows of different lengths; absorbed, and with a watched map, which is called for all cached tokens."""
    model = randomise(build(small(layers=2, attention=VARIATIONS[name])), 0.1).eval()
    if not absorbed:
        for sublayer in list(model.sublayers)[::2]:
            sublayer.body.expand.register_forward_hook(lambda *_: None)
    tokens = tokens_and_targets(length=9)[0]
    cache = model.new_cache(2, 12)
    counts = torch.tensor([5, 3])
    with torch.no_grad():
        full = model(tokens)
        found = [model.logits(model.hidden(tokens[:, :5], cache=cache, counts=counts))]
        cache.static = static
        for t in range(3):
            at = (counts + t)[:, None]
            found.append(model(tokens.gather(1, at), cache=cache))
            close(f"token {t}", found[-1][:, 0], full[torch.arange(2), at[:, 0]])
        if not static:
            rest = torch.stack([tokens[0, 8:], tokens[1, 6:7]])
            close("further tokens at once", model(rest, cache=cache)[0], full[0, 8:])
    close("prefill", found[0][0], full[0, :5])
    close("prefill of the shorter row", found[0][1, :3], full[1, :3])


@pytest.mark.parametrize("absorbed", [True, False])
def test_decoding_up_to_a_slot_equals_decoding_with_a_mask(absorbed: bool) -> None:
    """As on a GPU, where a step knows its last slot and has no mask; keys are twice as wide as values here."""
    module = latent(LATENT | {"shared_dim": 6, "positions": "none", "value_dim": 6}).float()
    x = random(2, 5, WIDTH, grad=False).float()
    if not absorbed:
        module.expand.register_forward_hook(lambda *_: None)
    cache, positions = module.new_cache(2, 8, x), torch.arange(5).expand(2, -1)
    with torch.no_grad():
        module(x[:, :4], (), Context(None, None, Now(positions[:, :4], None, None, None, None), cache))
        now = Now(positions[:, 4:], None, positions[:, 4], None, None)
        y, _ = module(x[:, 4:], (), Context(None, None, now, cache))
        close("last token", y, run(module, x)[:, 4:], 1e-5)


def test_decoding_kernels_refuse_values_of_another_width() -> None:
    """Keys and values may have the same strides: the kernel would read values as wide as keys."""
    keys = torch.randn(2, 5, 2, 12)
    values, until = torch.randn(2, 5, 2, 12)[..., :6], torch.tensor([4, 2])
    with ops.backend("triton"), pytest.raises(ValueError, match="no fused kernel of decode_attention"):
        decode_attention(torch.randn(2, 2, 12), keys, values, until)


def test_latent_cache_holds_only_latent_and_shared_part() -> None:
    model = build(small(attention=KIMI))
    kinds = [type(part) for part in model.new_cache(2, 9).sublayers[::2]]
    assert kinds == [RecurrentCache, KeyValueCache, KeyValueCache]
    shapes = [tuple(tensor.shape) for tensor in model.new_cache(3, 9).sublayers[2].tensors()]
    assert shapes == [(3, 9, 1, 10), (3, 9, 1, 4)]


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name not in {*SEVERAL_READS, "injection"}])
def test_a_kimi_model_combines_with_every_topology(topology: str) -> None:
    """It learns, packs documents, and decodes like one full pass; experts are not looped."""
    config = small(layers=3, attention=KIMI, ffn=EXPERTS, topology=TOPOLOGIES[topology])
    model = randomise(build(config), 0.05).eval()
    tokens, targets = tokens_and_targets()
    model.loss(tokens, targets).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not silent
    with torch.no_grad():
        close("logits", in_parts(model, tokens, [4, 1, 1]), model(tokens))


def decoding_gap(model: Decoder, tokens: Tensor, routing_fixed: bool) -> float:
    """Largest difference of decoded logits from the full pass, as a share of the largest logit; tokens [1, T]."""
    chosen: dict[nn.Module, Tensor] = {}
    routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]

    def note(router: nn.Module, _: Any, routed: ops.Routed) -> None:
        chosen.setdefault(router, routed.chosen)

    hooks = [router.register_forward_hook(note) for router in routers]
    cache, worst = model.new_cache(1, tokens.shape[1]), 0.0
    with torch.no_grad():
        full = model(tokens)[0].float()
        for t in range(tokens.shape[1]):
            for router in routers if routing_fixed else ():
                router.bias.zero_()[chosen[router][t]] = 100.0  # decides which experts, not their weights
            worst = max(worst, float((model(tokens[:, t : t + 1], cache=cache)[0, 0].float() - full[t]).abs().max()))
    for hook in hooks:
        hook.remove()
    return worst / float(full.abs().max())


@pytest.mark.nightly
def test_bfloat16_decoding_differs_by_flipped_experts() -> None:
    """Rounding flips near ties between experts; with the same experts the difference is small."""
    model = build(RunConfig.find("kimi-linear-mini").override(["model.vocab_size=1024"]).model).eval()
    tokens = torch.randint(1024, (1, 96))
    assert decoding_gap(model, tokens, routing_fixed=False) < 1e-4
    model = model.to(torch.bfloat16)
    free, fixed = (decoding_gap(model, tokens, routing_fixed) for routing_fixed in (False, True))
    assert fixed < 0.02 and free > 4 * fixed


def test_named_layers_use_softmax_and_others_the_delta_rule() -> None:
    model = build(small(attention=KIMI))
    bodies = [sublayer.body for sublayer in model.sublayers][::2]
    assert [type(body) for body in bodies] == [KimiDeltaAttention, LatentAttention, LatentAttention]
    assert model.config.softmax_layers == (1, 2) and model.config.linear.kind == "kimi_delta"
    assert model.config.latent.rank == 10 and model.config.softmax is None


def test_taps_show_the_heads_of_latent_attention() -> None:
    module, x = latent(LATENT), random(2, 7, WIDTH, grad=False)
    with taps.record() as seen:
        y = run(module, x)
    q, k, v = (seen[f"attention.0.{name}"] for name in ("query", "key", "value"))
    assert (q.shape[2:], k.shape[2:], v.shape[2:]) == ((2, 10), (2, 10), (2, 5))
    weights = (torch.einsum("bthd,bshd->bhts", q, k) * 10**-0.5).masked_fill(
        ~torch.ones(7, 7).tril().bool(), -torch.inf
    )
    heads = torch.einsum("bhts,bshd->bthd", weights.softmax(-1), v)
    close("output", heads.flatten(-2) @ module.out.weight.T, y)
    assert module.query_heads == (2, 5)


def test_flops_count_key_and_value_widths() -> None:
    with_latents = measure(small(attention=NOWHERE))
    assert with_latents.flops_per_token == 6 * with_latents.active + round(6 * 3 * 2 * (10 + 5) / 2 * 8)
    linear = measure(small(attention=DELTA))
    assert linear.flops_per_token == 6 * linear.active


def test_hybrid_tables_may_omit_their_kind() -> None:
    linear = {"key_heads": 1, "value_heads": 2}
    short = small(attention={"kind": "hybrid", "softmax_every": 3, "softmax": {"heads": 2}, "linear": linear})
    assert (short.softmax.kind, short.linear.kind) == ("softmax", "gated_deltanet")
    kimi_config = small(attention=KIMI)
    assert type(kimi_config).from_dict(kimi_config.model_dump(exclude_none=True)) == kimi_config


def test_quantized_decoding_equals_the_quantized_full_forward() -> None:
    """The map that makes keys and values is rounded: it is called for all cached tokens, as in the full forward."""
    from residua.quantize.modules import quantize_model
    from residua.quantize.schemes import find_scheme

    model = build(small(layers=3, attention=KIMI, ffn=EXPERTS)).eval()
    rounded = quantize_model(model, find_scheme("fp8-row"))
    maps = {name.split(".")[3] for name in rounded if ".body." in name}
    assert maps >= {"project", "gate", "expand", "out", "experts"}
    assert not any(name.endswith((".decay", ".gates", ".router")) for name in rounded)
    tokens = tokens_and_targets()[0]
    with torch.no_grad():
        torch.testing.assert_close(in_parts(model, tokens, [4, 1, 1]), model(tokens), rtol=1e-4, atol=1e-5)


def test_kimi_retrofit_starts_as_the_model_it_replaces() -> None:
    old = randomise(build(small(layers=3, attention=KIMI, ffn=EXPERTS)), 0.1).eval()
    old.sublayers[3].body.router.bias.copy_(torch.linspace(-0.3, 0.3, 5))
    new = build(small(layers=3, attention=KIMI, ffn=EXPERTS, topology={"kind": "multi_gate", "streams": 2})).double()
    kept = retrofit(new, old)
    assert kept["model"] < InitFidelity.NOT
    assert torch.equal(new.sublayers[3].body.router.bias, old.sublayers[3].body.router.bias)
