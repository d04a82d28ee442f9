"""Every family: logits as transformers computes them, after import and export."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import residua
from residua.config.model import ModelConfig
from residua.convert.families import FAMILIES as KNOWN
from residua.convert.families import find_family
from residua.convert.positions import READERS
from residua.data.tokenizer import Tokenizer
from residua.errors import UserError
from residua.export import export
from residua.model.decoder import Decoder
from residua.model.equivalence import InitFidelity
from residua.model.retrofit import retrofit
from residua.model.rope import rotary_table
from residua.model.size import measure
from residua.storage.hugging_face import import_folder
from residua.storage.load import load
from tests.convert.tiny import (
    DEEP_YARN,
    EXPERTS,
    FAMILIES,
    GEMMA4,
    KIMI,
    LATENT,
    ROTARY,
    SIZES,
    logits,
    saved,
    tokens,
)  # fmt: skip
from tests.model.small import small
from tests.nightly import only_nightly

pytest.importorskip("transformers")
TOLERANCE = 1e-5
ROTARY_BEFORE_5 = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
SECOND = ("mistral", "phi3, whole heads", "granite, biases", "exaone4, no window", "qwen3_5_moe_text",
          "glm4_moe, biases", "deepseek_v3, full queries", "deepseek_v3", "deepseek_v2, greedy", "flex_olmo", "glm4",
          "seed_oss", "granitemoe", "nanochat, yarn", "ministral", "llama, biases, tied", "mixtral, one expert",
          "qwen2, windows", "starcoder2, no biases", "gpt_neox, in turn", "cohere",
          "gemma4", "qwen2", "qwen3, biases", "olmo2, biases", "gemma2, no caps", "qwen3_moe, raw weights",
          "qwen3_moe, one expert", "kimi_linear, low-rank queries, raw weights", "kimi_linear, one expert")  # fmt: skip
REWORKED = {"phi": ("lm_head", "model.final_layernorm"), "nanochat": ("model.embed_tokens",)}
"""Tensors of which a folder written back has others that give the same logits."""
DISTINCT = [name for name in FAMILIES if name not in SECOND]


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_all_families_and_rope_scalings_are_covered() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {architecture.lower().replace("_", "") for architecture, _ in FAMILIES.values()} == {
        name.replace("_text", "").replace("_", "") for name in KNOWN
    }
    assert set(READERS) == set(ROPE_INIT_FUNCTIONS)
    assert {table["rope_type"] for table in ROTARY.values()} == set(READERS)


def test_documented_table_lists_every_family() -> None:
    from tools.families import PAGE, describe

    page = PAGE.read_text(encoding="utf-8")
    missing = [row for row in describe() if "| `{}` | {} | {} | ".format(*row) not in page]
    assert not missing and all(rest for *_, rest in describe()), "python tools/families.py writes the table"


@pytest.mark.slow
@pytest.mark.parametrize("names", [["phi3", "granite"], pytest.param([*FAMILIES], marks=pytest.mark.nightly)])
def test_documented_differences_are_reproducible(names: list[str]) -> None:
    from tools.families import PAGE, differences, rows

    measured = differences(names)
    assert all(difference <= TOLERANCE for difference in measured.values())
    page = re.sub(r"\de[+-]\d\d", "", PAGE.read_text(encoding="utf-8"))
    assert all(re.sub(r"\de[+-]\d\d", "", row) in page for row in rows(measured))


@pytest.mark.slow
@pytest.mark.parametrize("name", only_nightly(FAMILIES, DISTINCT))
def test_logits_match_transformers_after_import_and_export(name: str, tmp_path: Path) -> None:
    architecture, keys = FAMILIES[name]
    theirs = saved(tmp_path / "hf", architecture, **keys)
    expected = logits(theirs, tokens())
    equal(logits(load(tmp_path / "hf"), tokens()), expected)
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert torch.equal(logits(load(tmp_path / "run"), tokens()), logits(load(tmp_path / "hf"), tokens()))

    model_type = theirs.config.model_type
    assert_written(load(tmp_path / "run"), tmp_path / "run", model_type)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert not written.keys() & set(ROTARY_BEFORE_5)
    family = find_family(model_type)
    files = (load_file(tmp_path / which / "model.safetensors") for which in ("hf", "back"))
    first, second = ({family.named(name): tensor for name, tensor in file.items()} for file in files)
    assert first.keys() == second.keys()
    changed = family.FREE or any(
        part in model_type for part in ("gemma", "qwen3_next", "qwen3_5")
    )  # gains less one, and factors worked into weights, are rounded
    for tensor in (name for name in first if not name.startswith(REWORKED.get(model_type, ()))):
        torch.testing.assert_close(second[tensor], first[tensor], rtol=0, atol=1e-6 if changed else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", only_nightly(FAMILIES, {"gpt2", "gpt_neox", "cohere2", "qwen3_next", "gemma2", "ministral3"})
)
def test_cached_and_padded_logits_match_transformers(name: str, tmp_path: Path) -> None:
    """Rows of two lengths: ours padded on the right, theirs on the left; then one token more from the cache."""
    architecture, keys = FAMILIES[name]
    theirs, given, short = saved(tmp_path, architecture, **keys), tokens(), 30
    model, (long, cut) = load(tmp_path), given
    cache = model.new_cache(2, 41)
    with torch.no_grad():
        hidden = model.hidden(torch.stack([long, cut]), cache=cache, counts=torch.tensor([40, short]))
        ours = model.logits(torch.stack([hidden[0, -1], hidden[1, short - 1]]))
        after = model(given[:, :1], cache=cache)[:, 0]
        left = torch.stack([long, torch.cat([cut.new_zeros(40 - short), cut[:short]])])
        mask = torch.ones_like(left)
        mask[1, : 40 - short] = 0
        first = theirs(left, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0), use_cache=True)
        mask = torch.cat([mask, mask[:, -1:]], 1)
        steps = {"past_key_values": first.past_key_values, "position_ids": mask.sum(-1, keepdim=True) - 1}
        second = theirs(given[:, :1], attention_mask=mask, **steps)
    equal(ours, first.logits[:, -1])
    equal(after, second.logits[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("name", only_nightly(FAMILIES, {"gpt2", "qwen3_next", "ministral3"}))
def test_packed_documents_have_the_logits_of_each_alone(name: str, tmp_path: Path) -> None:
    architecture, keys = FAMILIES[name]
    theirs, (row, _) = saved(tmp_path, architecture, **keys), tokens()
    model, first = load(tmp_path), 23
    with torch.no_grad():
        packed = model(row[None], segments=(torch.arange(len(row)) >= first).long()[None])[0]
    for part in (slice(first), slice(first, None)):
        equal(packed[part], logits(theirs, row[None, part])[0])


CHANGES: list[dict[str, Any]] = [
    {"topology": {"kind": "multi_gate", "streams": 2}},
    {"topology": {"kind": "block_attnres", "sublayers_per_block": 2}},
    {"norm": {"kind": "gatednorm", "rank": 4}},
    {"anchors": {"kind": "resformer"}},
]
EXPLAINED = ("topology.kind = 'parallel'", "mixes heads", "mixes the heads", "mixes keys and values")


@pytest.mark.slow
@pytest.mark.parametrize("name", only_nightly(FAMILIES, {"gpt_neox", "gemma4, keys as values"}))
def test_family_retrofits_keep_their_claims_or_state_a_reason(name: str, tmp_path: Path) -> None:
    architecture, keys = FAMILIES[name]
    saved(tmp_path, architecture, **keys)
    old = load(tmp_path)
    before = logits(old, tokens())
    for change in CHANGES:
        try:
            new = residua.build(ModelConfig(**old.config.model_dump(exclude_none=True) | change))
            claims = retrofit(new, old)
        except UserError as refusal:
            assert "norm" not in change and any(reason in str(refusal) for reason in EXPLAINED)
            continue
        if claims["model"] is InitFidelity.EXACTLY:
            equal(logits(new, tokens()), before)


@pytest.mark.slow
def test_deepseek_scores_include_the_yarn_factor(tmp_path: Path) -> None:
    """Queries take it in, so a folder written again has other queries and no `mscale_all_dim`."""
    keys = LATENT | {"rope_parameters": DEEP_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "vocab_size": 300}
    theirs = saved(tmp_path / "hf", "DeepseekV3", **keys)
    equal(logits(load(tmp_path / "hf"), tokens()), logits(theirs, tokens()))
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert_written(load(tmp_path / "run"), tmp_path / "run", "deepseek_v3")


def test_multi_token_prediction_layers_are_skipped(tmp_path: Path) -> None:
    architecture, keys = FAMILIES["glm4_moe"]
    expected = logits(saved(tmp_path, architecture, **keys), tokens())
    saved_tensors = load_file(tmp_path / "model.safetensors")
    save_file(saved_tensors | {"model.layers.3.enorm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    equal(logits(load(tmp_path), tokens()), expected)


def assert_written(model: Decoder, run: Path, layout: str) -> None:
    """Write the model of a run to `back`, next to it; the byte tokenizer has more ids than the tiny vocabulary."""
    from residua.export.folder import write_layout

    run.mkdir(exist_ok=True)
    Tokenizer.bytes().save(run / "tokenizer.json")
    difference = write_layout(model, Tokenizer.bytes(), run, run.parent / "back", layout)
    assert difference is not None and difference < TOLERANCE


@pytest.mark.parametrize("length", [40, 3000])
@pytest.mark.parametrize("name", ["plain", *ROTARY])
def test_rotary_angles_are_bit_identical_to_transformers(name: str, length: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    pairs = 32
    table = {"rope_type": "default"} if name == "plain" else {**ROTARY[name], "factor": 3.7}  # 1/4 would be exact
    if "short_factor" in table:
        table |= {
            "short_factor": [1 + 0.1 * i for i in range(pairs)],
            "long_factor": [2 + 0.37 * i for i in range(pairs)],
        }
    keys = SIZES | {"head_dim": 2 * pairs, "max_position_embeddings": table.pop("max_position_embeddings", 64)}
    keys |= {"rope_parameters": {"rope_theta": 10_000.0, **table}}
    positions = torch.arange(length)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**keys))(torch.zeros(1), positions[None])
    softmax = find_family("llama").read(keys).softmax
    assert softmax is not None and (softmax.rope_scaling is None) == (name == "plain")
    ours = rotary_table(positions, 2 * pairs, softmax.rope_theta, softmax.rope_scaling)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other[0, :, :pairs])


@pytest.mark.slow
@pytest.mark.parametrize("name", ROTARY)
def test_scaled_positions_match_transformers(name: str, tmp_path: Path) -> None:
    table = dict(ROTARY[name])
    keys = {"max_position_embeddings": table.pop("max_position_embeddings", 64)}
    theirs = saved(tmp_path / "hf", "Llama", rope_parameters={"rope_theta": 500.0, **table}, **keys)
    model = load(tmp_path / "hf")
    equal(logits(model, tokens()), logits(theirs, tokens()))
    again = find_family("llama").read(find_family("llama").write(model.config))
    assert again.softmax == model.config.softmax


def test_mistral_with_layer_types_is_read_as_ministral(tmp_path: Path) -> None:
    """transformers' automatic classes read a `mistral` with `layer_types` as a `ministral`, and so do we."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    theirs = saved(tmp_path / "hf", "Ministral", vocab_size=300, head_dim=8, sliding_window=5, layer_types=kinds)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    model = load(tmp_path / "hf")
    assert model.config.softmax is not None and model.config.softmax.window_layers == (1,)
    equal(logits(model, tokens()), logits(theirs, tokens()))
    assert_written(model, tmp_path / "run", "mistral")


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_missing_window_takes_the_default_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    keys = {key: value for key, value in SIZES.items() if key != "pad_token_id"} | EXPERTS
    keys |= {"moe_intermediate_size": 24, "use_sliding_window": True, "max_window_layers": 0}
    softmax = find_family(model_type).read(keys).softmax
    assert softmax is not None and softmax.window == AutoConfig.for_model(model_type, **keys).sliding_window == 4096


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("mistral", "sliding_window_pattern", 2),
        ("mixtral", "norm_topk_prob", False),
        ("cohere2", "head_dim", 16),
        ("gemma", "final_logit_softcapping", 2.0),
        ("olmo3", "rope_local_base_freq", 7.0),
        ("olmo3", "sliding_window_pattern", 2),
        ("qwen3_5_moe_text", "norm_topk_prob", False),
        ("exaone4", "attention_bias", True),
        ("kimi_linear", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("gemma4_text", "rope_parameters", None),
        ("gemma4_text", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_keys_that_transformers_does_not_read_change_nothing(model_type: str, key: str, value: Any) -> None:
    keys = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
    keys |= KIMI if model_type == "kimi_linear" else GEMMA4 if model_type == "gemma4_text" else {}
    assert find_family(model_type).read(keys | {key: value}) == find_family(model_type).read(keys)


def test_both_spellings_of_gemma_4_are_read_identically() -> None:
    """The Hub's names the heads of full layers once, transformers' for each layer; the last layer is always full."""
    from transformers import AutoConfig

    keys = {key: value for key, value in SIZES.items() if key != "pad_token_id"} | GEMMA4
    keys |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    keys |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    ours = find_family("gemma4_text").read(json.loads(json.dumps(keys)))
    theirs = AutoConfig.for_model("gemma4_text", **keys).to_dict()
    assert find_family("gemma4_text").read(json.loads(json.dumps(theirs))) == ours and "per_layer_config" in theirs
    softmax = ours.softmax
    assert softmax is not None and softmax.full is not None and softmax.window_layers == (1,)
    assert softmax.full.model_dump() == {"head_dim": 16, "kv_heads": 1, "values": "keys"}


def test_configurations_of_earlier_versions_are_read() -> None:
    old = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "torch_dtype": "float16",
    }
    config = find_family("llama").read(old)
    softmax = config.softmax
    assert softmax is not None and softmax.rope_theta == 500.0 and softmax.kv_heads == 4
    assert softmax.rope_scaling is not None and softmax.rope_scaling.kind == "linear"
    local = {"rope_local_base_freq": 7.0, "rope_theta": 9.0, "head_dim": 16, "sliding_window_pattern": 2}
    gemma = find_family("gemma3_text").read(old | local | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    softmax = gemma.softmax
    assert softmax is not None and (softmax.rope_theta, softmax.local_rope_theta) == (9.0, 7.0)
    assert softmax.window_layers == (0, 2) and softmax.rope_scaling is not None
    layered = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}, "sliding_window": 5}
    layered |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    olmo = find_family("olmo3").read(old | layered).softmax  # rope_scaling of earlier versions wins in transformers
    assert olmo is not None and olmo.rope_scaling is not None and olmo.rope_scaling.kind == "linear"


def test_published_kimi_linear_configuration_equals_the_preset() -> None:
    """As moonshotai/Kimi-Linear-48B-A3B-Base spells it; of the layers, counted from 1, seven are full."""
    full = [4, 8, 12, 16, 20, 24, 27]
    keys = {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "model_max_length": 1048576,
        "head_dim": 72, "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1024, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_expert_group": 1,
        "topk_group": 1, "use_grouped_topk": True, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": full, "kda_layers": [n for n in range(1, 28) if n not in full],
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    family, preset = find_family("kimi_linear"), ModelConfig.preset("kimi-linear-48b-a3b")
    read = family.read(family.spelled(keys))
    assert family.keys(read) | {"initializer_range": 0} == family.keys(preset) | {
        "initializer_range": 0,
        "max_position_embeddings": 1048576,
    }
    assert family.misfits(preset) == []


@pytest.mark.slow
def test_kimi_preset_has_the_parameters_of_transformers_model() -> None:
    import transformers

    preset = ModelConfig.preset("kimi-linear-48b-a3b")
    with torch.device("meta"):
        theirs = transformers.KimiLinearForCausalLM(
            transformers.KimiLinearConfig(**find_family("kimi_linear").keys(preset))
        )
    assert sum(p.numel() for p in theirs.parameters()) == measure(preset).parameters


SHORT = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [2.0]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
    (
        "qwen3_5_text",
        {"hidden_act": "gelu_pytorch_tanh"},
        "a gated feed-forward with it is not supported (silu, swish)",
    ),
    ("llama", {"rope_scaling": {"rope_type": "axial"}}, "rope_type = 'axial' is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True}, "attention_out_bias without attention_bias"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 25}, "shared_expert_intermediate_size = 25"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": "four"}}, "rope_type = 'yarn' are inconsistent"),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type = 'yarn' needs 'factor'"),
    ("llama", {"is_causal": False}, "is_causal = False is not supported"),
    ("mistral", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
    ("qwen2", {"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for 3 layers"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 3 layers"),
    ("kimi_linear", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entry for 3 layers"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma4_text", {}, "hidden_size_per_layer_input = 256 is not supported"),
    ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2"),
    ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block = True"),
    (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_key_value_heads": 2, "per_layer_config": {"0": {"head_dim": 8}}},
        "per_layer_config changes more than the heads of full_attention",
    ),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ("kimi_linear", {"n_group": 3, "topk_group": 2}, "ffn.router.groups = 3 does not divide ffn.experts = 4"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
    ("deepseek_v3", LATENT | {"rope_scaling": SHORT}, "short has 1 factor"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope = False"),
    ("kimi_linear", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types has a dense layer after"),
    ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm = True"),
    ("starcoder2", {"hidden_act": "silu"}, "a plain feed-forward with it is not supported"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm = True"),
    ("bloom", {}, "because Residua lacks position biases in the scores (ALiBi): the nearest is 'gpt_neox'"),
    ("gemma3", {}, "model_type = 'gemma3' is not a supported family: the nearest is 'gemma3_text'"),
    (None, {}, "model_type = None"),
]


@pytest.mark.parametrize(("model_type", "keys", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_unsupported_or_missing_keys_are_refused_by_name(
    model_type: str | None, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"model_type": model_type, "moe_intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(sizes | keys))
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        import_folder(tmp_path, tmp_path / "run")
    assert str(refusal.value).startswith(f"{tmp_path} cannot be imported") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": None}, "hidden_size is null, expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected 1 or more"),
        ({"rope_scaling": 3}, "rope_scaling is 3, expected an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or false"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace is null, expected a whole number"),
        ({"logit_scale": 0.0}, "logit_scale is 0.0, expected more than 0"),
        ({"no_rope_layers": "all"}, "no_rope_layers is 'all', expected a list"),
        ({"intermediate_size": None}, "config.json"),
    ],
    ids=str,
)
def test_invalid_keys_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    sizes = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes | keys))
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("layout", "tables", "message"),
    [
        (
            "qwen3",
            {"topology": {"kind": "multi_gate", "streams": 2}},
            "topology.kind = 'multi_gate' has no counterpart",
        ),
        (
            "qwen3",
            {"topology": {"kind": "highway"}, "reader_eps": "sum"},
            "topology.kind = 'highway' has no counterpart",
        ),
        ("llama", {}, "attention.qk_norm = 'rms' has no counterpart in the llama layout"),
        ("qwen3", {"norm": {"kind": "gatednorm"}}, "norm.kind = 'gatednorm'"),
        ("qwen3", {"norm": {"kind": "rmsnorm", "eps": 1e-5}}, "attention.qk_eps = 1e-06"),
        ("mixtral", {"attention": {"kind": "softmax", "heads": 2, "qk_norm": "none"}}, "ffn.kind = 'swiglu'"),
        ("qwen3", {"attention": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2}}, "attention.kind"),
    ],
)
def test_layouts_refuse_models_they_cannot_express(layout: str, tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_family(layout).write(small(**tables))


def test_a_plain_model_exports_in_the_qwen3_layout(tmp_path: Path) -> None:
    model = residua.build(small(vocab_size=300, attention={"kind": "softmax", "heads": 2, "kv_heads": 1}))
    assert_written(model, tmp_path / "run", "qwen3")
    equal(logits(load(tmp_path / "back"), tokens()), logits(model, tokens()))


def test_kimi_with_only_linear_layers_is_written_in_its_layout(tmp_path: Path) -> None:
    """transformers' cache of such a model refuses to say how long it is."""
    mixture = {"kind": "moe", "hidden": 16, "experts": 4, "top_k": 2, "shared": 1, "activation": "swiglu"}
    linear = {"kind": "kimi_delta", "heads": 2, "head_dim": 8}
    norm, router = {"kind": "rmsnorm", "eps": 1e-5}, {"kind": "sigmoid_scores"}
    head = {"kind": "untied"}
    tables = {"attention": linear, "ffn": mixture | {"router": router}, "norm": norm, "head": head}
    assert_written(residua.build(small(vocab_size=300, **tables)), tmp_path / "run", "kimi_linear")


def test_import_counts_the_parameters_that_export_counts(tmp_path: Path) -> None:
    """The biases of a router are buffers, not parameters: gradients do not train them."""
    architecture, keys = FAMILIES["kimi_linear"]
    saved(tmp_path / "hf", architecture, **keys)
    made = import_folder(tmp_path / "hf", tmp_path / "run")
    assert made.parameters == sum(p.numel() for p in load(tmp_path / "run").parameters())


def test_export_refuses_an_unknown_layout(tmp_path: Path) -> None:
    saved(tmp_path / "hf", "Llama", vocab_size=300)
    import_folder(tmp_path / "hf", tmp_path / "run")
    Tokenizer.bytes().save(tmp_path / "run" / "tokenizer.json")
    assert export(tmp_path / "run", tmp_path / "out", layout="llama").difference is not None
    with pytest.raises(ValueError, match="model_type = 'lama' is not a supported family"):
        export(tmp_path / "run", tmp_path / "other", layout="lama")
