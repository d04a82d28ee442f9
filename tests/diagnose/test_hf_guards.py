"""Guards: metrics that do not fit the model are skipped with a reason, and the rest of the diagnosis is correct."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from residua.diagnose import Diagnosis, diagnose_model, hf_structure, huggingface
from residua.diagnose.attention import Scores, attend_and_sum, merged
from residua.diagnose.hf_checks import check_layers
from residua.diagnose.huggingface import HuggingFaceSubject
from residua.diagnose.observe import Observation, Site
from residua.diagnose.page import diagnosis_page
from residua.diagnose.sentences import absent
from tests.diagnose import architectures, models
from tests.diagnose.planted import named
from tests.diagnose.test_huggingface import TOKENS, random_text

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="transformers is not installed")


def reasons(subject: HuggingFaceSubject, start: str) -> list[str]:
    return [reason for reason in subject.skipped if reason.startswith(start)]


def test_attention_metrics_that_change_the_loss_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any, **options: Any) -> tuple[Tensor, None]:
        y, _ = hf_structure.attention(*given, **options)
        return 1.5 * y, None

    model = models.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.normal_()
        own = float(cross_entropy(model(TOKENS, use_cache=False).logits.flatten(0, 1), TOKENS.flatten()))
    monkeypatch.setattr(huggingface, "attention", wrong)
    subject = HuggingFaceSubject(model, "llama")
    seen = subject.observe(TOKENS, TOKENS)
    assert seen.attention == {} and subject.ablations(("head",)) == []
    (reason,) = reasons(subject, "Attention metrics")
    assert f"with its own {own:.4f}" in reason and seen.loss == pytest.approx(own, rel=1e-6)
    assert len(seen.states) == 5 and len(seen.outputs) == 4
    made = diagnose_model(subject, random_text(), ablations="none")
    assert reason in made.skipped and reason in diagnosis_page(Diagnosis(models=[made])).html().replace("&#x27;", "'")


def test_a_model_that_reads_later_tokens_is_refused() -> None:
    import transformers

    config = architectures.configuration("bert")
    with pytest.raises(ValueError, match=r"^BertLMHeadModel also attends to later tokens, so its next-token loss is"):
        HuggingFaceSubject(transformers.AutoModelForCausalLM.from_config(config), "encoder")
    config.is_decoder = True
    assert HuggingFaceSubject(transformers.AutoModelForCausalLM.from_config(config), "decoder").layers == 2


def test_unknown_attention_arguments_are_named() -> None:
    subject = HuggingFaceSubject(architectures.build("minimax_m3_vl_text"), "sparse")
    (reason,) = reasons(subject, "Attention metrics")
    assert "block_indices" in reason
    assert subject.observe(TOKENS % 64, TOKENS % 64).attention == {}


def test_layers_with_compressed_keys_are_skipped_with_a_reason() -> None:
    subject = HuggingFaceSubject(architectures.build("deepseek_v4"), "streams")
    tokens = architectures.rows()[:, :-1]
    assert sorted(subject.observe(tokens, tokens).attention) == [0]
    (reason,) = reasons(subject, "Attention metrics")
    assert "layers 1" in reason and "several tokens" in reason


@pytest.mark.parametrize("kind", ["olmo", "nanochat"])
def test_zero_padding_embedding_does_not_hide_gainless_norms(kind: str) -> None:
    model = architectures.build(kind)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    subject = HuggingFaceSubject(model, kind)
    assert [site.kind for site in subject.sites] == ["attention", "feed-forward"] * 2
    assert reasons(subject, "Sublayers") == []


class Doubling(nn.Module):
    """A layer that doubles its input before its sublayer reads it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states + self.body(2 * hidden_states)


def test_layer_that_changes_its_input_is_one_sublayer() -> None:
    model = models.build("llama")
    model.model.layers[1] = Doubling(models.WIDTH)
    subject = HuggingFaceSubject(model, "doubling")
    assert [site.kind for site in subject.sites] == ["attention", "feed-forward", "layer"]
    (reason,) = reasons(subject, "Sublayers of layers 1")
    assert "what the first one reads" in reason
    seen = subject.observe(TOKENS, TOKENS)
    torch.testing.assert_close(seen.states[2] + seen.outputs[2], seen.states[3])


def test_scaled_outputs_are_recorded_with_their_scale() -> None:
    given, outputs = torch.randn(1, 4, 8), [torch.randn(1, 4, 8), torch.zeros(1, 4, 8), torch.randn(1, 4, 8)]
    sites = [Site(k, 0, "feed-forward") for k in range(3)]
    seen = Observation(torch.zeros(1, 4))
    seen.outputs = dict(enumerate(outputs))
    seen.states = {0: given, 1: given + 0.25 * outputs[0], 2: given + 0.25 * outputs[0]}
    found = check_layers(seen, sites, {0: (given, given + 0.25 * outputs[0] + 0.5 * outputs[2])})
    assert found.scales == pytest.approx({0: 0.25, 2: 0.5}, rel=1e-5) and not found.wrong and not found.partial
    seen.states[2] = torch.randn(1, 4, 8)
    assert check_layers(seen, sites, {0: (given, given)}).wrong == [0]


def test_16_bit_rounding_does_not_hide_scaled_residuals() -> None:
    subject = HuggingFaceSubject(architectures.build("granite").to(torch.bfloat16), "granite")
    tokens = architectures.rows()[:, :-1]
    assert sorted(subject.observe(tokens, tokens).attention) == [0, 1]
    assert subject.scales == pytest.approx(dict.fromkeys(range(4), 0.5), rel=0.01)
    assert len(subject.skipped) == 1


def test_learned_sink_is_reported_instead_of_token_sinks() -> None:
    model = models.build("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(5.0)
    made = diagnose_model(HuggingFaceSubject(model, "gpt_oss"), random_text(), ablations="none")
    assert named(made) == {("learned_sink", (("layers", (0, 1)),))}
    assert any("learned sink takes as much attention" in line for line in made.summary)
    assert "attention sink on a token," in absent(made) and "attention sink," not in absent(made)


@pytest.mark.parametrize(("kind", "place"), [("mixtral", 0), ("qwen3_moe", 0), ("olmoe", 0), ("llama4_text", 1)])
def test_expert_load_follows_the_router_logits(kind: str, place: int) -> None:
    """`place` of the logits in a router's output; before 5.19 transformers does not return those of Llama 4."""
    model = architectures.build(kind)
    tokens, logits = architectures.rows()[:, :-1], list[Tensor]()
    seen = HuggingFaceSubject(model, kind).observe(tokens, tokens)
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _, __, output: logits.append(output[place]))
    with torch.no_grad():
        model(tokens, use_cache=False)
    assert len(logits) == len(seen.loads) > 0
    for layer, scores in enumerate(logits):
        chosen = scores.topk(2, -1).indices.flatten()
        torch.testing.assert_close(seen.loads[layer], torch.bincount(chosen, minlength=4).double() / chosen.numel())


def test_biased_and_bidirectional_attention_match_definition() -> None:
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (5, 7, 7))
    bias = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    y, sums = attend_and_sum(q, k, v, Scores(scale=0.5, bias=bias, causal=False))
    weights = (0.5 * q @ k.transpose(-1, -2) + bias).softmax(-1)
    torch.testing.assert_close(y, weights @ v)
    torch.testing.assert_close(sums.received, weights.sum(2))
    both = merged([sums, sums])
    torch.testing.assert_close(both.received, torch.cat([sums.received, sums.received], 1))
    torch.testing.assert_close(both.uniform, sums.uniform)


def test_heads_of_two_attentions_in_a_layer_are_numbered_on() -> None:
    subject = HuggingFaceSubject(architectures.build("longcat_flash"), "two")
    heads = [a.head for a in subject.ablations(("head",)) if a.index == 0]
    assert heads == list(range(8))
