"""peft, accelerate, torchao and transformers' own helpers work on exported models: here, and without Residua."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import residua
from residua.config.choices import AnchorChoice, NormChoice, TopologyChoice
from tests.export import with_tools
from tests.export.exported import FACTORS, VOCABULARY, bytes_config, in_transformers, made_of, trained_like, write
from tests.model.combinations import TABLES
from tests.model.small import small

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")
if find_spec("peft") is None:  # its import takes seconds, in every worker that collects this file
    pytest.skip("needs peft", allow_module_level=True)

# Every topology, source of anchors, norm, attention, feed-forward and head at least once.
COMBINATIONS = [
    ("additive", "none", "gatednorm", "gated", "relu2", "untied"),
    ("clipped", "resformer", "rmsnorm", "no qk-norm", "gelu", "tied"),
    ("full_attnres", "nuresformer with gate", "gatednorm", "gated", "swiglu", "tied"),
    ("block_attnres", "exoformer", "preaffine", "grouped", "relu2", "untied"),
    ("multi_gate", "exoformer dynamic", "gated_dyt", "gated", "swiglu", "tied"),
    ("multi_gate independent", "none", "rmsnorm", "hybrid", "moe", "tied"),
    ("highway", "exoformer", "gatednorm tensorwise", "sink", "moe plain", "tied"),
    ("highway elementwise", "none", "dyt", "linear", "glu", "untied"),
    ("hyper", "nuresformer", "rmsnorm", "hybrid", "swiglu", "tied"),
    ("hyper static", "exoformer with gate", "gatednorm tanh", "gated", "relu2", "untied"),
    ("mhc", "resformer", "preaffine", "grouped", "moe", "tied"),
    ("mhc_lite", "none", "dyt", "linear", "swiglu", "untied"),
    ("dense", "exoformer with gate", "gatednorm silu", "sink", "relu2", "tied"),
    ("x0 sublayer", "gated_value", "preaffine", "gated", "relu2", "untied"),
    ("mudd", "exoformer dynamic", "gatednorm", "gated", "swiglu", "tied"),
    ("dca", "resformer", "rmsnorm", "grouped", "relu2", "tied"),
    ("gated_residual", "value_embeddings", "rmsnorm", "hybrid gated", "relu2", "untied"),
    ("delta_attnres", "none", "dyt", "latent", "glu", "tied"),
    ("resi_dual", "gated_value", "rmsnorm", "no qk-norm", "gelu", "untied"),
    ("hyper_single_pass", "gated_value", "gatednorm", "plain", "swiglu", "tied"),
    ("injection", "exoformer", "rmsnorm", "plain", "relu2", "tied"),
    ("scaled", "lime", "derf", "grouped", "swiglu", "tied"),
    ("lns", "depth_attention", "rmsnorm", "gated", "relu2", "untied"),
    ("keel", "cla", "derf", "no qk-norm", "swiglu", "tied"),
    ("deepnorm", "svformer", "rmsnorm", "plain", "gelu", "tied"),
    ("laurel", "gated_value", "gatednorm", "grouped", "relu2", "untied"),
    ("frac", "value_embeddings", "derf", "gated", "moe", "tied"),
    ("frac static", "resformer", "preaffine", "sink", "glu", "tied"),
    ("hyper cyclic", "none", "rmsnorm", "hybrid kimi", "swiglu", "untied"),
    ("parallel", "resformer", "layernorm", "grouped", "gelu", "tied"),
    ("layer_factor", "gated_value", "layernorm bare", "plain", "relu2", "untied"),
    ("multi_gate", "none", "unit_rmsnorm", "no qk-norm", "swiglu", "tied"),
]
QUICK = next(row for row in COMBINATIONS if row[0] == "mudd")  # several reads, anchors and gates


def exported(row: tuple[str, ...], home: Path) -> Path:
    """A folder, and next to it the results of Residua."""
    torch.manual_seed(5)
    model = trained_like(bytes_config(made_of(*row)))
    folder = write(model, home / "_".join(" ".join(row[:3]).split()))
    tokens = torch.randint(VOCABULARY - 1, (2, 9))
    with torch.no_grad():
        save_file({"tokens": tokens, "logits": model(tokens)}, folder.with_suffix(".safetensors"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return exported(QUICK, tmp_path_factory.mktemp("tools"))


NIGHTLY = {"lora_by_name"}
EVERY = [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in with_tools.CHECKS]


@pytest.mark.parametrize("check", EVERY)
def test_tools_accept_an_export(check: str, folder: Path, tmp_path: Path, copied_code: None) -> None:
    with_tools.CHECKS[check](folder, tmp_path)


@pytest.mark.parametrize("factor", ["topology", "anchors", "norm"])
def test_tool_tests_cover_every_kind(factor: str) -> None:
    families = {"topology": TopologyChoice, "anchors": AnchorChoice, "norm": NormChoice}
    ours = (each for each in families[factor].alternatives() if each.__module__.startswith("residua."))
    kinds = {choice.model_fields["kind"].default for choice in ours}
    tried = {TABLES[factor][row[FACTORS.index(factor)]]["kind"] for row in COMBINATIONS}
    assert kinds - tried <= {"boundary_attnres"}  # built of the parts of Block


@pytest.mark.nightly
def test_tools_accept_every_part_without_residua(run_without_residua, tmp_path: Path) -> None:
    folders = [exported(row, tmp_path / "models") for row in COMBINATIONS]
    passed = run_without_residua(Path(with_tools.__file__), tmp_path / "home", *folders, folder=tmp_path)
    assert len(passed) == len(COMBINATIONS) and all(checks == [*with_tools.CHECKS] for checks in passed.values())


@torch.no_grad()
def test_residua_reads_a_resized_model(folder: Path, tmp_path: Path, copied_code: None) -> None:
    model = in_transformers(folder)
    model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
    model.save_pretrained(tmp_path / "resized")
    again = residua.load(tmp_path / "resized")
    assert again.config.vocab_size == VOCABULARY + 7
    tokens = torch.full((1, 4), VOCABULARY + 6)
    torch.testing.assert_close(again(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_projections_and_embeddings_are_plain_torch_modules() -> None:
    model = residua.build(small(layers=1, attention={"kind": "softmax", "heads": 2, "bias": "all"}))
    assert isinstance(model.embed, torch.nn.Embedding)
    project = model.sublayers[0].body.project
    assert isinstance(project, torch.nn.Linear) and not project.bias.any()
    assert project.in_features == 16 and project.out_features == len(project.weight)
    assert not {"bias"} & model.sublayers[1].body.out.state_dict().keys()


def test_attention_weights_and_double_inputs_are_refused(folder: Path, copied_code: None) -> None:
    model = in_transformers(folder)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="does not return attention weights: leave output_attentions out"):
        model(tokens, output_attentions=True)
    for given in ({}, {"input_ids": tokens, "inputs_embeds": model.get_input_embeddings()(tokens)}):
        with pytest.raises(ValueError, match="takes either input_ids or inputs_embeds"):
            model(**given)
