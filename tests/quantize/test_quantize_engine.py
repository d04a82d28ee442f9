"""Folders in transformers' own names, opened by it: the same weights and, for FP8, the same rounded model."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import residua
from residua.config.model import ModelConfig
from residua.data.loader import Batch
from residua.model.decoder import Decoder
from residua.ops.low_precision.nvfp4 import round_nvfp4, static_scale
from residua.quantize import quantize
from residua.quantize.engine import find_layout, require_served, rows_of, save_engine
from residua.quantize.evaluate import CalibrationText, largest_inputs, mean_loss
from residua.quantize.modules import LowProjection, install, quantize_weights, rounded, targets
from residua.quantize.schemes import SCHEMES, find_scheme
from tests.convert.tiny import FAMILIES, saved
from tests.quantize.conftest import quiet_transformers
from tests.trained import train_run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You passed `quantization_config`")]

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "context": 32, "layers": 2, "width": 128, "attention": {"kind": "softmax", "heads": 4},
    "ffn": {"kind": "swiglu", "hidden": 256}, "init": {"std": 0.1, "output": "normal"},
}  # fmt: skip
DYNAMIC = [name for name, scheme in SCHEMES.items() if scheme.static is None]
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


def quantized(scheme: str, out: Path, exempt: tuple[str, ...] = (), **changes: Any) -> Decoder:
    """A random model written as Qwen3, and itself in low precision."""
    torch.manual_seed(0)
    model = residua.build(ModelConfig(**(SHAPE | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return written(model, scheme, out, exempt)


def written(model: Decoder, scheme: str, out: Path, exempt: tuple[str, ...] = ()) -> Decoder:
    """The model in low precision, after it was written for engines."""
    modules = targets(model, exempt)
    weights = quantize_weights(modules, find_scheme(scheme))
    save_engine(out, out.parent, model, weights, scheme, dict.fromkeys(modules, 30.0))
    install(model, rounded(modules, weights, find_scheme(scheme)))
    return model.eval()


def assert_served_alike(folder: Path, model: Decoder) -> Any:
    """The folder as transformers opens it, after its logits were compared with the model's."""
    served = opened_by_transformers(folder)
    card = (folder / "README.md").read_text()
    assert "written by `residua quantize`" in card and f'from_pretrained("{folder.name}")' in card
    with torch.no_grad():
        found, ours = served(TOKENS).logits, model.eval()(TOKENS)
    assert (found - ours).norm() < 1e-4 * ours.norm()
    return served


def opened_by_transformers(folder: Path) -> Any:
    transformers = quiet_transformers()
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    known = signature(transformers.CompressedTensorsConfig.__init__).parameters
    asked = transformers.CompressedTensorsConfig(**({"dequantize": True} if "dequantize" in known else {}))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked, dtype="auto").eval()


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_transformers_reads_the_same_weights(scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme, tmp_path / "q")
    theirs = opened_by_transformers(tmp_path / "q")
    layer, attention, ffn = theirs.model.layers[1], model.sublayers[2].body, model.sublayers[3].body
    project = torch.cat([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight])
    gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    pairs = [(project, attention.project), (layer.self_attn.o_proj.weight, attention.out)]
    for found, ours in [*pairs, (gate_up, ffn.gate_up), (layer.mlp.down_proj.weight, ffn.out)]:
        assert torch.equal(found, ours.weight.to(found.dtype))


NARROW = {"width": 96, "attention": {"kind": "softmax", "heads": 4, "head_dim": 32}}
GROUPED = {"attention": {"kind": "softmax", "heads": 4, "kv_heads": 2}}
ODD = {"width": 120, "attention": {"kind": "softmax", "heads": 4, "head_dim": 32}}
ROUNDED = {
    "tied": {"head": {"kind": "tied"}},
    "untied": {"head": {"kind": "untied"}},
    "biases": {"attention": {"kind": "softmax", "heads": 4, "qk_norm": "none", "bias": "qkv"}},
}
SERVED = [(scheme, name) for scheme in DYNAMIC if scheme != "nvfp4" for name in ROUNDED]


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [*((scheme, ROUNDED[name]) for scheme, name in SERVED), ("fp8-row", GROUPED | {"width": 96}), ("fp8", NARROW)],
    ids=[*map("-".join, SERVED), "fp8-row-parts", "fp8-narrow"],
)
def test_transformers_gives_equal_logits_for_rounded_inputs(scheme: str, changes: Any, tmp_path: Path) -> None:
    assert_served_alike(tmp_path / "q", quantized(scheme, tmp_path / "q", **changes))


def test_nvfp4_in_transformers_keeps_exempt_modules_exact(tmp_path: Path) -> None:
    model = quantized("nvfp4", tmp_path / "q", exempt=("*.project",))
    theirs = opened_by_transformers(tmp_path / "q")
    with torch.no_grad():
        assert theirs(TOKENS).logits.isfinite().all()
    q = theirs.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(q, model.sublayers[0].body.project.weight[:128].to(q.dtype))


def test_transformers_gives_equal_logits_with_static_scales(tmp_path: Path) -> None:
    scheme = find_scheme("nvfp4-static")
    model = residua.build(ModelConfig(**SHAPE)).eval()
    modules = targets(model)
    peaks = largest_inputs(model, modules, [Batch(TOKENS[:, :-1], TOKENS[:, 1:], None)])
    weights = quantize_weights(modules, scheme)
    save_engine(tmp_path / "q", tmp_path, model, weights, scheme.name, peaks)
    theirs = opened_by_transformers(tmp_path / "q").float()
    model.bfloat16().float()  # rounded like the unquantized tensors of the folder
    low = rounded(modules, weights, scheme, {name: static_scale(peak) for name, peak in peaks.items()})
    for name, module in low.items():
        module.weight.data = module.weight.data.bfloat16().float()  # transformers unpacks FP4 into bf16
        model.set_submodule(name, module)
    with torch.no_grad():
        found, ours = theirs(TOKENS).logits, model(TOKENS)
        for module in low.values():
            module.activation = round_nvfp4
        dynamic = model(TOKENS)
    assert (found - ours).norm() < 1e-4 * ours.norm()
    assert (found - dynamic).norm() > 1e-2 * ours.norm()


@pytest.mark.parametrize(
    ("scheme", "dtype"), [("nvfp4-static", torch.bfloat16), ("fp8-row", torch.float32)], ids=["nvfp4", "fp8"]
)
def test_printed_loss_is_measured_on_the_engines_folder(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ffn, exempt = {"kind": "swiglu", "hidden": 64}, ("sublayers.1.body.out",)
    run = train_run(tmp_path, width=32, ffn=ffn)
    how = {"scheme": scheme, "calibration": 4, "probes": 0, "exempt": exempt}
    result = quantize(run, tmp_path / "q", engine=tmp_path / "served", **how)
    model = residua.load(tmp_path / "q").eval()
    validation = CalibrationText.of_folder(run, model.config, None).validation()
    assert mean_loss(model, validation) == result.loss_after

    theirs = opened_by_transformers(tmp_path / "served")
    assert theirs.dtype == dtype  # transformers' default is the one that works: FP4 is unpacked into bf16
    with torch.no_grad():
        assert theirs(validation[0].tokens).logits.isfinite().all()
    stored = load_file(tmp_path / "served" / "model.safetensors")
    pairs = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.norm.weight": model.norm.weight,
        "model.layers.1.self_attn.q_norm.weight": model.sublayers[2].body.qk_norm.query,
        "model.layers.0.mlp.down_proj.weight": model.sublayers[1].body.out.weight,
    }
    for name, ours in pairs.items():
        assert stored[name].dtype == dtype and torch.equal(stored[name].float(), ours)

    for module in model.modules():
        if isinstance(module, LowProjection) and dtype == torch.bfloat16:
            module.weight.data = module.weight.data.bfloat16().float()
    with torch.no_grad():
        found, ours = (m(validation[0].tokens) for m in (theirs.float(), model))
    assert (found.logits - ours).norm() < 1e-4 * ours.norm()


def test_row_slices_keep_the_scales_of_the_whole_matrix() -> None:
    x = torch.randn(320, 64)
    for scheme in SCHEMES.values():
        whole = scheme.weight(x)
        for first, count in ((0, 128), (128, 192)):
            assert torch.equal(rows_of(whole, first, count).dequantize(), whole.dequantize()[first : first + count])


@pytest.mark.parametrize(
    ("scheme", "changes", "exempt", "sentence"),
    [
        ("fp8-group", NARROW, (), "input widths that are multiples of 128, but sublayers.0.body.project has 96"),
        ("nvfp4", ODD, (), "input widths that are multiples of 16, but sublayers.0.body.project has 120"),
        ("fp8", GROUPED, (), "would cut blocks of 128 rows, because sublayers.0.body.project .* 128, 64, 64"),
        ("fp8", {"ffn": {"kind": "swiglu", "hidden": 192}}, (), "cut blocks .* sublayers.1.body.gate_up .* 192, 192"),
        ("fp8-row", GROUPED | {"width": 96}, (), None),
        ("nvfp4", GROUPED, (), None),
        ("fp8", GROUPED, ("*.project",), None),
    ],
)
def test_models_an_engine_would_round_differently_are_refused(
    scheme: str, changes: dict[str, Any], exempt: tuple[str, ...], sentence: str | None
) -> None:
    model = residua.build(ModelConfig(**(SHAPE | changes)))
    if sentence is None:
        require_served(model, targets(model, exempt), scheme)
        return
    with pytest.raises(ValueError, match=f"--engine with {scheme} .*{sentence}.*: use --scheme fp8-row, or leave"):
        require_served(model, targets(model, exempt), scheme)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_imported_model_is_served_as_its_original_family(name: str, tmp_path: Path) -> None:
    quiet_transformers()
    architecture, keys = FAMILIES[name]
    saved(tmp_path / "theirs", architecture, **keys)
    model = residua.load(tmp_path / "theirs")
    require_served(model, targets(model), "fp8-row")
    assert assert_served_alike(tmp_path / "q", written(model, "fp8-row", tmp_path / "q")).config.model_type == name


def test_logits_differ_only_where_rounding_differs(tmp_path: Path) -> None:
    """A position of six-layer models can be off by 0.1; given the inputs of our matrices, no position is."""
    architecture, keys = FAMILIES["llama"]
    deep = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    saved(tmp_path / "theirs", architecture, **keys | deep)
    model = written(residua.load(tmp_path / "theirs"), "fp8-row", tmp_path / "q")
    served = opened_by_transformers(tmp_path / "q")
    for k, sublayer in enumerate(model.sublayers):
        layer, body = served.model.layers[k // 2], sublayer.body
        if k % 2:
            pairs = {body.gate_up: (layer.mlp.gate_proj, layer.mlp.up_proj), body.out: (layer.mlp.down_proj,)}
        else:
            theirs = layer.self_attn
            pairs = {body.project: (theirs.q_proj, theirs.k_proj, theirs.v_proj), body.out: (theirs.o_proj,)}
        for ours, parts in pairs.items():
            inputs: list[torch.Tensor] = []
            ours.register_forward_pre_hook(lambda _, given, kept=inputs: kept.append(given[0]))
            for part in parts:
                part.register_forward_pre_hook(lambda _, given, kept=inputs: (kept[0],))
    tokens = torch.randint(97, (4, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, found = model(tokens), served(tokens).logits
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_an_empty_matrix_stays_empty(scheme: str, shape: tuple[int, int]) -> None:
    chosen, empty = find_scheme(scheme), torch.empty(shape)
    assert chosen.weight(empty).dequantize().shape == chosen.activation(empty).shape == shape


@pytest.mark.parametrize(
    "change",
    [
        {"norm": {"kind": "gatednorm"}},
        {"topology": {"kind": "full_attnres"}},
        {"anchors": {"kind": "resformer"}},
        {"ffn": {"kind": "relu2", "hidden": 64}},
        {"attention": {"kind": "softmax", "heads": 4, "gate": "headwise"}},
        {"attention": {"kind": "softmax", "heads": 4, "qk_norm": "rms_all"}},
        {"placement": "output"},
        {"embed_scale": 8.0, "attention": {"kind": "softmax", "heads": 4, "qk_norm": "none"}},  # as Gemma
    ],
    ids=str,
)
def test_an_unservable_shape_is_refused_by_its_feature(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"models of the shape of .* has {next(iter(change))}.*: leave --engine out"):
        find_layout(ModelConfig(**(SHAPE | change)))


def test_the_first_matching_family_is_chosen() -> None:
    heads = {"kind": "softmax", "heads": 4}
    shapes: dict[str, dict[str, Any]] = {
        "qwen3": {"attention": heads | {"qk_eps": 1e-5}, "norm": {"kind": "rmsnorm", "eps": 1e-5}},
        "llama": {"attention": heads | {"qk_norm": "none"}},
        "qwen2": {"attention": heads | {"qk_norm": "none", "bias": "qkv"}},
        "mistral": {"attention": heads | {"qk_norm": "none", "window": 8}},
    }
    for name, changes in shapes.items():
        assert find_layout(ModelConfig(**(SHAPE | changes))).model_type == name
