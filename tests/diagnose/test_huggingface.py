"""Hugging Face models are found by structure: many architectures, hybrids and mixtures of experts among them."""

import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from residua import machine
from residua.diagnose import Diagnosis, diagnose, diagnose_model
from residua.diagnose.folder import open_subject
from residua.diagnose.huggingface import HuggingFaceSubject
from residua.diagnose.text import Sample
from residua.errors import UserError
from residua.quantize import quantize
from tests.diagnose import models
from tests.diagnose.planted import named, sample_of
from tests.trained import train_run

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="transformers is not installed")

CPU = torch.device("cpu")
TOKENS = torch.randint(models.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
SUBLAYERS = {
    **dict.fromkeys(("llama", "qwen3", "gpt2", "gemma2", "olmo2"), ["attention", "feed-forward"] * 2),
    **dict.fromkeys(("gpt_oss", "mixtral", "qwen3_moe"), ["attention", "mixture of experts"] * 2),
    "qwen3_next": ["linear attention", "mixture of experts"] * 3 + ["attention", "mixture of experts"],
}


def random_text() -> Sample:
    return sample_of(torch.randint(models.VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(6)))


def eager(model: Any, tokens: Tensor) -> Any:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(tokens, use_cache=False, output_attentions=True)


@pytest.mark.parametrize("name", SUBLAYERS)
def test_structure_states_and_outputs_are_found(name: str) -> None:
    model = models.build(name)
    expected = eager(model, TOKENS).logits
    subject = HuggingFaceSubject(model, name)
    assert [site.kind for site in subject.sites] == SUBLAYERS[name]
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    seen = subject.observe(TOKENS, TOKENS)
    for k in range(len(subject.sites)):  # the input of a sublayer plus its output is the input of the next
        torch.testing.assert_close(seen.states[k] + seen.outputs[k], seen.states[k + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_oss", "mixtral", "qwen3_next", "gemma2"])
def test_attention_sums_equal_the_models_own_maps(name: str) -> None:
    model = models.build(name)
    if name == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    maps = eager(model, TOKENS).attentions
    seen = HuggingFaceSubject(model, name).observe(TOKENS, TOKENS)
    assert len(seen.attention) == len(maps)
    for (_, sums), weights in zip(sorted(seen.attention.items()), maps, strict=True):
        weights = weights.double()
        torch.testing.assert_close(sums.received, weights.sum(2), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sums.entropy, torch.special.entr(weights).sum((2, 3)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums.outside, (1 - weights.sum(-1)).sum(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_oss", "mixtral", "qwen3_moe", "qwen3_next", "bloom"])
def test_every_architecture_is_diagnosed_from_its_folder(name: str, tmp_path: Path) -> None:
    folder = models.save(models.build(name), tmp_path / name)
    made = diagnose([folder], tmp_path / "out", tokens=128, length=32, ablations="layers", device="cpu").models[0]
    assert made.loss == pytest.approx(5.58, abs=0.3)
    assert [f.kind for f in made.findings] == ["chance_level_loss"]
    assert "the loss of" in made.summary[1].lower() and "is no better than" in made.summary[1]
    assert "without" not in made.description
    assert len(made.states) == len(made.sites) + 1
    assert sum(a.kind == "layer" for a in made.ablations) == made.layers
    assert all(site.gradient_rms for site in made.sites)
    assert Diagnosis.read(tmp_path / "out" / "diagnosis.json").models[0] == made
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(f'<th scope="row">layer {n}</th>' in page for n in range(made.layers)) and 'id="plotly"' in page


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensors: {name: t for name, t in tensors.items() if ".layers.1." not in name},
         r"lacks tensor 'model\.layers\.1\.self_attn\.q_proj\.weight' .* the first of 9 such tensors"),
        (lambda tensors: {f"my.{name}": t for name, t in tensors.items()},
         r"lacks tensor 'model\.embed_tokens\.weight' of LlamaForCausalLM, the first of 21 such tensors"),
        (lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"][:5].clone()},
         r"holds 'model\.norm\.weight' with shape \[5\] where LlamaForCausalLM has \[32\]"),
    ],
    ids=["without a layer", "renamed", "cut"],
)  # fmt: skip
def test_missing_weights_are_refused_not_initialised(spoil: Any, words: str, tmp_path: Path) -> None:
    folder = models.save(models.build("llama"), tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    save_file(spoil(tensors), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=words) as error:
        open_subject(folder, CPU)
    assert "\n" not in str(error.value)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    """An adapter that was not merged; but not the tensors that transformers itself skips silently."""
    folder = models.save(models.build("llama"), tmp_path / "llama")
    name = "model.layers.0.self_attn.q_proj.lora_{}.weight"
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extra = {name.format("A"): torch.ones(2, 3), name.format("B"): torch.ones(3, 2), buffer: torch.ones(4)}
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors", {"format": "pt"})
    made = diagnose([folder], tmp_path / "out", tokens=64, length=32, ablations="none", device="cpu").models[0]
    assert f", without tensors {name.format('A')!r} and 1 more of its folder. Loss" in made.summary[0]
    said = f"The folder's tensors {name.format('A')!r}, {name.format('B')!r}: LlamaForCausalLM has no such parameters"
    assert sum(reason.startswith(said) for reason in made.skipped) == 1
    assert not any("inv_freq" in words for words in (*made.summary, *made.skipped))
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert name.format("B") in page


HOSTILE = {
    "vocabulary": ("llama", {"vocab_size": 150_000_000}, r"asks for 9,600,0\d\d,\d\d\d parameters, but the files have"),
    "layers": ("llama", {"num_hidden_layers": 10**7}, r"asks for 10,000,000 layers \(num_hidden_layers\), but .* 21"),
    "more layers": ("llama", {"num_hidden_layers": 10**12, "hidden_size": 0}, "asks for 1,000,000,000,000 layers"),
    "layers by another name": ("gpt2", {"n_layer": 10**9}, r"asks for 1,000,000,000 layers \(n_layer\)"),
    "some layers": ("llama", {"num_hidden_layers": 1000}, "asks for more than 1,084 tensors, and the folder's files"),
    "heads": ("llama", {"num_attention_heads": 10**6, "hidden_size": 10**6}, "asks for .* parameters, but the files"),
    "experts": ("mixtral", {"num_local_experts": 10**9}, "asks for .* parameters, but the files have"),
    "positions": ("gpt2", {"n_positions": 10**9}, "asks for .* parameters, but the files have"),
    "width": ("llama", {"intermediate_size": 10**30}, "cannot be opened as a causal language model"),
    "negative": ("llama", {"hidden_size": -5}, "cannot be opened as a causal language model"),
    "words": ("llama", {"num_hidden_layers": "many"}, "cannot be opened as a causal language model"),
    "choices": ("mixtral", {"num_experts_per_tok": 1000}, "cannot be opened as a causal language model"),
    "nested": ("llama", {"text_config": {"n_layers": 10**10}}, r"asks for 10,000,000,000 layers \(n_layers\)"),
    "long": ("llama", {"pad": "x" * (17 << 20)}, "longer than 16 MiB, too long for a configuration"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {name: models.save(models.build(name), root / name) for name in ("llama", "gpt2", "mixtral")}


def with_config(folder: Path, out: Path, keys: dict[str, Any]) -> Path:
    """A copy of a model folder with other numbers in its config.json."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    return out


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_config_is_refused_before_allocating_memory(case: str, folders: Any, tmp_path: Path) -> None:
    name, keys, words = HOSTILE[case]
    folder = with_config(folders[name], tmp_path / "hostile", keys)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(UserError, match=words) as error:
        open_subject(folder, CPU)
    assert "\n" not in str(error.value)
    assert time.process_time() - start < 20 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


@pytest.mark.parametrize(
    ("free", "dtype"),
    [(1 << 40, torch.float32), (120_000, torch.bfloat16), (50_000, None)],
    ids=["much", "some", "little"],
)
def test_16_bit_weights_stay_if_float32_does_not_fit(
    free: int, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build("llama").to(torch.bfloat16)
    assert 50_000 < 2 * model.num_parameters() < 120_000 < 4 * model.num_parameters() / 0.8
    folder = models.save(model, tmp_path / "llama")
    monkeypatch.setattr(machine, "free_memory", lambda device=None: free)
    if dtype is None:
        words = r"the model of its config\.json has 3\d,\d\d\d parameters and needs 0\.1 MiB"
        with pytest.raises(machine.TooLarge, match=words):
            open_subject(folder, CPU)
        return
    subject = open_subject(folder, CPU)
    assert next(subject.model.parameters()).dtype == dtype
    made = diagnose_model(subject, random_text(), ablations="none")
    assert f"torch.{made.precision}" == str(dtype)


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_without_a_head_is_refused_unless_it_is_tied(kind: str, tmp_path: Path) -> None:
    import transformers

    config = models.build("llama").config
    folder = models.save(getattr(transformers, kind)(config), tmp_path / "own")
    with pytest.raises(ValueError, match=r"lacks tensor 'lm_head\.weight' of LlamaForCausalLM: "):
        open_subject(folder, CPU)
    config.tie_word_embeddings = True
    assert open_subject(models.save(getattr(transformers, kind)(config), tmp_path / "tied"), CPU).layers == 2


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_an_engines_folder_is_diagnosed_in_its_own_dtype(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    run = train_run(tmp_path, width=32, ffn={"kind": "swiglu", "hidden": 64})
    served = tmp_path / "served"
    quantize(run, tmp_path / "q", scheme="nvfp4-static", engine=served, calibration=4, probes=0)
    made = diagnose([served], tmp_path / "out", tokens=64, device="cpu").models[0]
    assert len(made.sites) == 4 and sum(a.kind == "layer" for a in made.ablations) == 2
    assert not any(s.gradient_rms for s in made.sites) and "without" not in made.description
    assert sum(reason.startswith("Gradients: no sublayer weight") for reason in made.skipped) == 1


def test_a_hybrid_reports_layers_without_attention_weights() -> None:
    subject = HuggingFaceSubject(models.build("qwen3_next"), "hybrid")
    assert any("layers 0, 1, 2" in reason and "linear attention" in reason for reason in subject.skipped)
    assert sorted(subject.observe(TOKENS, TOKENS).attention) == [3]


def test_model_outside_the_attention_interface_is_reported() -> None:
    subject = HuggingFaceSubject(models.build("bloom"), "bloom")
    seen = subject.observe(TOKENS, TOKENS)
    assert seen.attention == {} and len(seen.states) == 5
    assert any(reason.startswith("Attention metrics") for reason in subject.skipped)
    torch.testing.assert_close(seen.states[1] + seen.outputs[1], seen.states[2])


def test_hyper_connection_streams_are_not_taken_for_a_residual() -> None:
    import transformers

    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no multi-stream model")
    subject = HuggingFaceSubject(models.build("deepseek_v4"), "streams")
    assert subject.state_name == "sublayer input"
    made = diagnose_model(subject, random_text())
    assert [s.reader for s in made.streams] == [2, 4]
    assert all(0 < d < 1 for d in made.streams[1].angular_distance if d is not None)
    assert len(made.streams[1].angular_distance) == 3
    assert len(made.states) == len(made.sites)  # before the final norm there are only streams


class Strange(nn.Module):
    """A layer whose parts do not return the hidden width, so that it counts as one sublayer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inner = self.up(hidden_states)
        return hidden_states + torch.tanh(inner) @ self.down.weight.T


def test_an_unknown_layer_counts_as_one_and_the_rest_is_measured() -> None:
    model = models.build("llama")
    model.model.layers[1] = Strange(models.WIDTH)
    subject = HuggingFaceSubject(model, "strange")
    assert [site.kind for site in subject.sites] == ["attention", "feed-forward", "layer"]
    assert any(reason.startswith("Sublayers") for reason in subject.skipped)
    seen = subject.observe(TOKENS, TOKENS)
    torch.testing.assert_close(seen.states[2] + seen.outputs[2], seen.states[3])


@pytest.mark.parametrize(("name", "offset"), [("llama", 0.0), ("qwen3_next", 1.0), ("gemma2", 1.0), ("gpt2", 0.0)])
def test_norm_gains_include_their_offset(name: str, offset: float) -> None:
    model = models.build(name)
    norms = {"gpt2": "ln_1"}
    layers = model.transformer.h if name == "gpt2" else model.model.layers
    norm = getattr(layers[1], norms.get(name, "input_layernorm"))
    with torch.no_grad():
        norm.weight.copy_(torch.rand(models.WIDTH))
    subject = HuggingFaceSubject(model, name)
    site = next(s.index for s in subject.sites if s.layer == 1)
    torch.testing.assert_close(subject.gains[site].float(), norm.weight.detach() + offset, rtol=1e-3, atol=1e-4)


def test_planted_defects_of_a_llama_are_named() -> None:
    model = models.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 5] = 41.0
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.fill_(7.0)
                norm.weight[5] = 0.006
            for matrix in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj, layer.self_attn.o_proj):
                matrix.weight.normal_(std=0.2)
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    made = diagnose_model(HuggingFaceSubject(model, "llama"), random_text())
    assert named(made) == {("residual_sink", (("dimension", 5),)), ("dead_layer", (("layer", 1),))}


def test_removing_a_head_equals_zeroing_its_output() -> None:
    model = models.build("llama")
    subject = HuggingFaceSubject(model, "llama")
    ablation = next(a for a in subject.ablations(("head",)) if a.index == 1 and a.head == 2)
    with ablation.applied(), torch.no_grad():
        removed = float(subject.loss(TOKENS, TOKENS))
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 16:24] = 0
        assert removed == pytest.approx(float(subject.loss(TOKENS, TOKENS)), rel=1e-6)
