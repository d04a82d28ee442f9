"""Hybrids and mixtures of experts under diagnosis."""

import pytest
import torch

from residua.diagnose import Diagnosis, ModelDiagnosis, api
from residua.diagnose.metrics.experts import Experts
from residua.diagnose.page import diagnosis_page
from residua.model.decoder import Decoder
from tests.diagnose import planted

LINEAR = {"key_heads": 1, "value_heads": 2, "head_dim": 8}
HYBRID = {"kind": "hybrid", "softmax_every": 2, "softmax": {"heads": 2}, "linear": LINEAR}
MIXTURE = {"kind": "moe", "hidden": 8, "experts": 4, "top_k": 2}
pytestmark = pytest.mark.slow


def model() -> Decoder:
    return planted.control(attention=HYBRID, ffn=MIXTURE)


@pytest.fixture(scope="module")
def made() -> tuple[Decoder, ModelDiagnosis]:
    torch.manual_seed(0)
    sparse = model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "TOKENS_AT_ONCE", 3 * planted.LENGTH)
        return sparse, planted.diagnosed(sparse, planted.sample(), ablations="layers")


def test_sites_are_named_by_their_kind(made: tuple[Decoder, ModelDiagnosis]) -> None:
    kinds = [site.kind for site in made[1].sites[:4]]
    assert kinds == ["linear attention", "mixture of experts", "attention", "mixture of experts"]


def test_attention_is_measured_on_the_softmax_layers(made: tuple[Decoder, ModelDiagnosis]) -> None:
    assert [a.layer for a in made[1].attention] == list(made[0].config.softmax_layers)
    assert made[1].skipped == []


def test_expert_load_covers_the_whole_text(made: tuple[Decoder, ModelDiagnosis]) -> None:
    sparse, found = made
    with torch.no_grad():
        _, _, routing = sparse.routed_losses(planted.sample().tokens, planted.sample().targets)
    assert [e.layer for e in found.experts] == list(range(sparse.config.layers))
    torch.testing.assert_close(torch.tensor([e.load for e in found.experts]), routing.load, atol=1e-6, rtol=0)


def test_kimi_linear_is_diagnosed_like_other_hybrids() -> None:
    attention = HYBRID | {
        "softmax": {"kind": "mla", "heads": 2, "head_dim": 6, "shared_dim": 4, "rank": 10, "positions": "none"},
        "linear": {"kind": "kimi_delta", "heads": 2, "head_dim": 8},
    }
    experts = MIXTURE | {"dense_layers": 1, "router": {"kind": "sigmoid_scores"}}
    sparse = planted.control(attention=attention, ffn=experts, topology={"kind": "full_attnres"})
    found = planted.diagnosed(sparse, planted.sample(), ablations="all")
    kinds = [site.kind for site in found.sites[:4]]
    assert kinds == ["linear attention", "feed-forward", "attention", "mixture of experts"]
    softmax = sparse.config.softmax_layers
    assert [a.layer for a in found.attention] == list(softmax) and found.skipped == []
    heads = [ablation.label for ablation in found.ablations if ablation.kind == "head"]
    assert heads == [f"layer {layer} head {head}" for layer in softmax for head in (0, 1)]
    assert [e.layer for e in found.experts] == list(range(1, sparse.config.layers))
    assert any(ablation.kind == "source" for ablation in found.ablations)


def test_dead_expert_is_reported(made: tuple[Decoder, ModelDiagnosis]) -> None:
    dead = made[1].experts[0].model_copy(update={"load": [0.5, 0.5, 0.0, 0.0]})
    (sentence,) = Experts.sentences(made[1].model_copy(update={"experts": [dead]}))
    assert "2 of 4 are never chosen" in sentence.text


def test_the_page_maps_expert_load_and_the_file_reads_back(made: tuple[Decoder, ModelDiagnosis]) -> None:
    diagnosis = Diagnosis(models=[made[1]])
    assert ">Expert load</h2>" in diagnosis_page(diagnosis).html()
    again = Diagnosis.model_validate_json(diagnosis.model_dump_json())
    assert again.models[0].experts == made[1].experts
