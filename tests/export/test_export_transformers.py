"""Common uses of a model in transformers work on an exported one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import residua
from tests.convert.tiny import saved
from tests.export.exported import VOCABULARY, bytes_config, in_transformers, trained_like, write
from tests.model.small import small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("copied_code")]
transformers = pytest.importorskip("transformers")

MIXED = {
    "layers": 2,
    "topology": {"kind": "block_attnres", "sublayers_per_block": 2},
    "anchors": {"kind": "nuresformer", "pathways": ["q", "k", "v"]},
    "norm": {"kind": "gatednorm", "rank": 4},
}
LINEAR = {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}
HYBRID = {"kind": "hybrid", "softmax_every": 2, "softmax": {"heads": 2}, "linear": LINEAR}
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return trained_like(bytes_config(small(**MIXED)))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    return write(model, tmp_path_factory.mktemp("exports") / "mixed")


@pytest.fixture
def exported(folder):
    return in_transformers(folder)


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory) -> Path:
    torch.manual_seed(2)
    model = trained_like(bytes_config(small(layers=2, attention=HYBRID)))
    return write(model, tmp_path_factory.mktemp("exports") / "hybrid")


@pytest.fixture(scope="module")
def kimi_folder(tmp_path_factory) -> Path:
    torch.manual_seed(2)
    attention = {
        "kind": "hybrid",
        "softmax_every": 2,
        "softmax": {"kind": "mla", "heads": 2, "head_dim": 6, "shared_dim": 4, "rank": 10, "positions": "none"},
        "linear": {"kind": "kimi_delta", "heads": 2, "head_dim": 8},
    }
    router = {"kind": "sigmoid_scores"}
    experts = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 12, "shared": 1, "router": router}
    model = trained_like(bytes_config(small(layers=2, attention=attention, ffn=experts)))
    return write(model, tmp_path_factory.mktemp("exports") / "kimi")


FOLDERS = {"mixed": "folder", "hybrid": "hybrid_folder", "kimi": "kimi_folder"}


def prompt(batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY - 1, (batch, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def test_installed_library_runs_and_matches_the_copied_code(folder, exported):
    library = in_transformers(folder, implementation="auto")
    assert type(library.model.decoder) is residua.Decoder
    assert type(exported.model.decoder).__module__.startswith("transformers_modules")
    given = prompt()
    torch.testing.assert_close(library(**given).logits, exported(**given).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(library.generate(**given, **GREEDY), exported.generate(**given, **GREEDY))


def test_a_fresh_process_opens_an_export_with_the_library():
    """transformers builds a model under torch.device("meta"), so Residua's files are first imported there."""
    script = "import torch\nwith torch.device('meta'): import residua.model.decoder, residua.ops.low_precision"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_unknown_implementation_is_refused(folder):
    with pytest.raises(ValueError, match="implementation 'kernel' does not exist"):
        in_transformers(folder, implementation="kernel")


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2"])
def test_attention_of_other_libraries_is_refused(name, folder, exported):
    for ask in (
        lambda: in_transformers(folder, attn_implementation=name),
        lambda: exported.set_attn_implementation(name),
    ):
        with pytest.raises(ValueError, match=f'^attn_implementation = "{name}" is not supported: use "sdpa"'):
            ask()


@pytest.mark.parametrize("which", FOLDERS)
def test_cached_equals_uncached_with_dynamic_and_static_caches(which, request):
    exported = in_transformers(request.getfixturevalue(FOLDERS[which]))
    given = prompt()
    given["attention_mask"][1, :3] = 0
    plain = exported.generate(**given, **GREEDY, use_cache=False)
    assert torch.equal(exported.generate(**given, **GREEDY), plain)
    assert torch.equal(exported.generate(**given, **GREEDY, prefill_chunk_size=3), plain)
    assert torch.equal(exported.generate(**given, **GREEDY, cache_implementation="static", disable_compile=True), plain)


@pytest.mark.parametrize("which", ["mixed", "hybrid"])
def test_beams_and_samples_do_not_depend_on_the_cache(which, request):
    exported = in_transformers(request.getfixturevalue("folder" if which == "mixed" else "hybrid_folder"))
    given = prompt()
    beams = {**GREEDY, "num_beams": 3}
    assert torch.equal(exported.generate(**given, **beams), exported.generate(**given, **beams, use_cache=False))
    drawn = {**GREEDY, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "num_return_sequences": 2}
    torch.manual_seed(3)
    first = exported.generate(**given, **drawn)
    torch.manual_seed(3)
    assert torch.equal(first, exported.generate(**given, **drawn, use_cache=False))


@pytest.mark.parametrize("which", FOLDERS)
def test_recurrent_models_refuse_assisted_generation(which, request):
    exported = in_transformers(request.getfixturevalue(FOLDERS[which]))
    given = prompt(batch=1)
    for guessing in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": exported}):
        if which == "mixed":
            plain = exported.generate(**given, **GREEDY)
            assert torch.equal(exported.generate(**given, **GREEDY, **guessing), plain)
        else:
            with pytest.raises(ValueError, match="not supported with stateful models"):
                exported.generate(**given, **GREEDY, **guessing)


def test_a_model_with_a_recurrent_state_cannot_be_an_assistant(exported, hybrid_folder):
    with pytest.raises(ValueError, match="linear attention cannot be an assistant"):
        exported.generate(**prompt(batch=1), **GREEDY, assistant_model=in_transformers(hybrid_folder))


def test_conversation_continues_from_its_cache(exported):
    given = prompt(batch=1)
    cache = transformers.DynamicCache(config=exported.config)
    first = exported.generate(**given, **GREEDY, past_key_values=cache)
    assert 0 < cache.get_seq_length() < first.shape[1]
    mask = torch.ones_like(first)
    onward = exported.generate(first, attention_mask=mask, **GREEDY, past_key_values=cache)
    assert torch.equal(onward, exported.generate(first, attention_mask=mask, **GREEDY))


def test_padding_on_either_side_changes_nothing_for_real_tokens(exported):
    given = prompt(batch=1)
    alone = exported(**given).logits
    for side in ((0, 3), (3, 0)):
        tokens, mask = (torch.nn.functional.pad(t, side) for t in (given["input_ids"], given["attention_mask"]))
        logits = exported(tokens, mask, use_cache=False).logits
        torch.testing.assert_close(logits[:, mask[0].bool()], alone, rtol=1e-4, atol=1e-5)


def test_restarting_positions_begin_a_new_document(exported):
    first, second = prompt(1, 4)["input_ids"], prompt(1, 5)["input_ids"]
    positions = torch.tensor([[*range(4), *range(5)]])
    packed = exported(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, 4:], exported(second).logits, rtol=1e-4, atol=1e-5)


def test_restarting_positions_with_a_cache_match_llama(tmp_path):
    llama = saved(tmp_path / "hf", "Llama", vocab_size=VOCABULARY, num_hidden_layers=1)
    ours = in_transformers(write(residua.load(tmp_path / "hf"), tmp_path / "ours"))
    tokens, positions = torch.arange(8)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with torch.no_grad():
        found, theirs = (model(tokens, position_ids=positions).logits for model in (ours, llama))
        alone, plain = ours(tokens[:, 4:]).logits, ours(tokens).logits
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)
    assert (found[:, 4:] - alone).abs().max() > 1e-2 and (found - plain).abs().max() > 1e-2


def test_logits_are_computed_only_for_requested_positions(exported):
    given = prompt()
    everything = exported(**given).logits
    torch.testing.assert_close(exported(**given, logits_to_keep=2).logits, everything[:, -2:])
    torch.testing.assert_close(exported(**given, logits_to_keep=torch.tensor([1, 3])).logits, everything[:, [1, 3]])


def test_labels_give_the_loss_of_residua(model, exported):
    tokens = prompt()["input_ids"]
    expected = model.loss(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(exported(tokens, labels=tokens).loss, expected, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_keeps_gradients_and_turns_off(exported):
    tokens = prompt()["input_ids"]
    exported.train()

    def gradients():
        exported.zero_grad()
        exported(tokens, labels=tokens).loss.backward()
        return {name: p.grad.clone() for name, p in exported.named_parameters() if p.grad is not None}

    plain = gradients()
    calls = []
    handle = exported.model.decoder.sublayers[0].body.register_forward_pre_hook(lambda *_: calls.append(1))
    exported.gradient_checkpointing_enable()
    assert not exported.model.decoder.anchors.shares_gradient
    again = gradients()
    assert len(calls) == 2  # once forward, once more in the backward pass
    assert plain.keys() == again.keys() and all(torch.equal(plain[n], again[n]) for n in plain)
    exported.gradient_checkpointing_disable()
    gradients()
    assert len(calls) == 3
    handle.remove()


def test_transformers_trainer_takes_steps(exported, tmp_path):
    data = [{"input_ids": t, "labels": t} for t in torch.randint(VOCABULARY, (4, 8))]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    before = exported.model.decoder.embed.weight.detach().clone()
    trainer = transformers.Trainer(model=exported, args=settings, train_dataset=data)
    assert trainer.train().training_loss > 0
    assert not torch.equal(before, exported.model.decoder.embed.weight)


@pytest.mark.parametrize("where", ["cpu", "auto"])
def test_device_map_places_the_whole_decoder(folder, exported, where):
    placed = in_transformers(folder, device_map=where)
    given = prompt()
    torch.testing.assert_close(placed(**given).logits, exported(**given).logits)


def test_model_saved_by_transformers_is_read_by_both(exported, tmp_path):
    with torch.no_grad():
        exported.model.decoder.embed.weight.add_(1.0)
    exported.save_pretrained(tmp_path / "saved")
    again = in_transformers(tmp_path / "saved")
    given = prompt()
    assert torch.equal(again(**given).logits, exported(**given).logits)
    native = residua.load(tmp_path / "saved")
    torch.testing.assert_close(native(given["input_ids"]), exported(**given).logits, rtol=1e-5, atol=1e-5)


def test_head_shares_the_embedding_only_when_tied(exported, tmp_path):
    assert exported.lm_head.weight is exported.get_input_embeddings().weight
    untied = trained_like(bytes_config(small(head={"kind": "untied"}, layers=1)))
    other = in_transformers(write(untied, tmp_path / "untied"))
    assert torch.equal(other.lm_head.weight, untied.unembed.weight)
    assert not torch.equal(other.lm_head.weight, other.get_input_embeddings().weight)


def test_half_precision_weights_keep_their_dtype(folder):
    half = in_transformers(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.isfinite(half(**prompt()).logits).all()


def test_the_base_model_returns_final_states(folder, model):
    base = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True, implementation="file").eval()
    tokens = prompt()["input_ids"]
    torch.testing.assert_close(base(tokens).last_hidden_state, model.hidden(tokens), rtol=1e-5, atol=1e-5)


def test_the_tokenizer_needs_no_remote_code_and_gives_equal_ids(folder):
    from residua.data.tokenizer import Tokenizer

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text = "naïve <|endoftext|> text"
    assert tokenizer(text, split_special_tokens=True).input_ids == Tokenizer.bytes().encode(text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == Tokenizer.bytes().end_of_text


def test_two_exports_with_the_same_name_keep_their_own_code(folder, exported, tmp_path):
    """`exported` has been opened before, from a folder of the same name."""
    other = trained_like(bytes_config(small(layers=1, norm={"kind": "dyt"})))
    second = in_transformers(write(other, tmp_path / folder.name))
    tokens = prompt()["input_ids"]
    torch.testing.assert_close(second(tokens).logits, other(tokens), rtol=1e-5, atol=1e-5)


def test_a_host_like_vllm_may_replace_the_attention(folder, exported):
    """vLLM registers a function, flattens its requests into one row, and finds each layer's cache by `layer_idx`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def attention(module, query, key, value, attention_mask, scaling=None, instances=None, **_):
        seen.append((module.layer_idx, instances, attention_mask))
        groups = {"enable_gqa": module.num_key_value_groups > 1}
        y = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=module.is_causal, scale=scaling, **groups
        )
        return y.transpose(1, 2).flatten(0, 1).flatten(-2), None

    ALL_ATTENTION_FUNCTIONS.register("a_host", attention)
    base = transformers.AutoModel.from_pretrained(
        folder, trust_remote_code=True, implementation="file", attn_implementation="a_host"
    ).eval()
    tokens = prompt(1)["input_ids"]
    positions = torch.arange(tokens.shape[1])[None]
    states = base(tokens, position_ids=positions, use_cache=False, return_dict=False, instances="caches")[0]
    torch.testing.assert_close(states, exported.model(tokens).last_hidden_state, rtol=1e-5, atol=1e-5)
    assert seen == [(0, "caches", None), (1, "caches", None)]


def test_a_hosts_attention_is_refused_if_it_would_be_wrong(hybrid_folder, folder):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("a_host", lambda *_, **__: None)
    for model, mask in ((hybrid_folder, None), (folder, torch.tensor([[0, 1, 1]]))):
        with pytest.raises(ValueError, match="only softmax attention without padding"):
            in_transformers(model, attn_implementation="a_host")(torch.zeros(1, 3, dtype=int), mask, use_cache=False)


@pytest.mark.parametrize("use_cache", [False, pytest.param(True, marks=pytest.mark.nightly)])
@torch.no_grad()
def test_a_kimi_model_with_experts_compiles_into_one_graph(kimi_folder, use_cache):
    exported = in_transformers(kimi_folder)
    torch._dynamo.reset()
    compiled = torch.compile(exported, fullgraph=True, backend="eager")
    given = {"input_ids": prompt()["input_ids"], "use_cache": use_cache}
    torch.testing.assert_close(compiled(**given).logits, exported(**given).logits)


def test_opening_exports_does_not_touch_residuas_operators(tmp_path: Path) -> None:
    """An export that registers operators under a name of Residua's takes them away from the library: it crashed."""
    models = [trained_like(bytes_config(small(layers=1, topology={"kind": kind}))) for kind in ("additive", "clipped")]
    folders = [write(model, tmp_path / model.config.topology.kind) for model in models]
    assert not any("torch.library" in file.read_text() for folder in folders for file in folder.glob("*.py"))
    opened = [in_transformers(folder) for folder in folders]
    tokens = torch.randint(VOCABULARY, (1, 5))
    for model, other in zip(models, opened, strict=True):
        expected = model(tokens)
        for each in (model, lambda given, other=other: other(given).logits):
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(each, fullgraph=True, backend="eager")(tokens), expected)
