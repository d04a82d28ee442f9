"""Sampling, streams of text, stop strings, and whole generations."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import pytest
import torch

import residua
from residua.data.tokenizer import Tokenizer
from residua.generate import generator
from residua.generate.generator import Completion, Generator, Request, weight_bytes
from residua.generate.sample import Sampler, Sampling, candidates
from residua.generate.text import Conversation, TextStream
from residua.model.attention import fold_mixing
from residua.model.decoder import Decoder
from residua.model.moe import MoE
from residua.storage.model_folder import place
from tests.model.combinations import ROWS, config_of, name_of
from tests.model.pairwise import Row
from tests.model.small import small
from tests.nightly import covering, only_nightly

TOKENIZER = Tokenizer.bytes()
CPU = torch.device("cpu")
PROMPTS = ["hello there", "a", "müde"]
# by the caches: `test_generate_cache.py` decodes every component
OF_EACH_ATTENTION = {row["attention"]: row for row in ROWS}.values()


def model(context: int = 64, **tables: object) -> Decoder:
    torch.manual_seed(5)
    return residua.build(small(vocab_size=260, context=context, **tables))


def continued(prompts: Sequence[Any], request: Request, **settings: object) -> list[Completion]:
    return Generator(model(), TOKENIZER, **settings)(prompts, request)[0]  # type: ignore[arg-type]


def test_first_tokens_are_shown_before_the_step_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """With empty caches of kernels, building one may take longer than reading the prompts."""
    happened: list[str] = []
    build, add = generator.build_step, generator._Batch.add
    monkeypatch.setattr(generator, "build_step", lambda *parts: (happened.append("build"), build(*parts))[1])
    monkeypatch.setattr(generator._Batch, "add", lambda *parts: (happened.append("add"), add(*parts))[1])
    made = Generator(model(), TOKENIZER)
    made(["hello"], Request(1))
    made(["hello", "a"], Request(3))
    assert happened == ["add", "add", "build", "add", "add"]


def test_top_k_and_top_p_keep_the_right_candidates() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    probabilities, ids = candidates(logits, Sampling(1.0, top_k=3))
    assert ids is not None and ids.tolist() == [[1, 3, 2]]
    torch.testing.assert_close(probabilities, torch.tensor([[4, 3, 2]]).double() / 9, rtol=0, atol=1e-6)
    probabilities, ids = candidates(logits, Sampling(1.0, top_p=0.5))
    assert ids is not None and [i for i, p in zip(ids[0].tolist(), probabilities[0], strict=True) if p > 0] == [1, 3]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.0, top_p=0.8)])
def test_samples_follow_the_probabilities(sampling: Sampling) -> None:
    rows, steps = 400, 10
    logits = torch.tensor([[0.3, 1.2, -0.4, 0.9, -9.0]])
    probabilities, ids = candidates(logits, sampling)
    expected = torch.zeros(5, dtype=torch.float64)
    expected[ids[0] if ids is not None else torch.arange(5)] = (probabilities / probabilities.sum())[0]
    sampler = Sampler(sampling, range(rows), steps, 5, CPU)
    drawn = torch.cat([sampler(logits.expand(rows, -1), step) for step in range(steps)])
    seen = torch.bincount(drawn, minlength=5) / len(drawn)
    assert (seen - expected).abs().max() < 0.03
    assert not seen[expected == 0].any()


def test_the_same_seed_repeats_and_another_differs() -> None:
    one, again, other = (continued(["x"], Request(20, Sampling(1.0, seed=seed))) for seed in (1, 1, 2))
    assert one == again and one != other


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3), Sampling(1.0, top_k=9, top_p=0.9, seed=3)])
def test_batching_does_not_change_the_text_of_a_prompt(sampling: Sampling) -> None:
    together = continued(PROMPTS, Request(12, sampling), chunk=4)
    for i, prompt in enumerate(PROMPTS):
        own = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed + i)
        assert continued([prompt], Request(12, own)) == [together[i]]


@pytest.mark.slow
@pytest.mark.parametrize("row", only_nightly(ROWS, but=OF_EACH_ATTENTION), ids=name_of)
def test_greedy_decoding_equals_argmax_without_cache(row: Row) -> None:
    built = residua.build(config_of(row).model_copy(update={"vocab_size": 257, "context": 24}))
    done, _ = Generator(built, TOKENIZER, chunk=3)(PROMPTS, Request(6))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        tokens = TOKENIZER.encode(prompt)
        with torch.no_grad():
            logits = built(torch.tensor([tokens + completion.tokens]))[0, len(tokens) - 1 :]
        likeliest = logits.argmax(-1).tolist()[:6]
        assert completion.tokens == list(takewhile(lambda token: token != TOKENIZER.end_of_text, likeliest))


def test_a_generator_used_twice_starts_fresh() -> None:
    generator = Generator(model(), TOKENIZER)
    first = generator(["abc"], Request(8))[0]
    assert generator(["xyz"], Request(6))[0] != first
    assert generator(["abc"], Request(8))[0] == first


@torch.no_grad()
def saying(token: int, weight: float = 2.0) -> Decoder:
    """A model for which `token` is likelier than all others, or less likely."""
    built = model(context=16)
    built.embed.weight.zero_()
    built.embed.weight[:, 0] = 1.0
    built.embed.weight[token, 0] = weight
    return built


def test_generation_ends_at_the_end_of_text_and_at_the_context() -> None:
    done, _ = Generator(saying(TOKENIZER.end_of_text), TOKENIZER)(["abc"], Request(9))
    assert (done[0].reason, done[0].tokens) == ("end", [])
    done, speed = Generator(saying(TOKENIZER.end_of_text, 0.0), TOKENIZER)(["abc", "abcdefghij"], Request(9))
    assert [(c.reason, len(c.tokens)) for c in done] == [("length", 9), ("length", 6)]
    assert (speed.new_tokens, speed.prompt_tokens, speed.steps) == (15, 13, 8)
    reasons = [Generator(saying(7), TOKENIZER, ends=ends)(["abc"], Request(3))[0][0].reason for ends in ((), (5, 7))]
    assert reasons == ["length", "end"], "at every token that ends a text"


def stream(pieces: list[bytes], stop: list[str]) -> tuple[list[str], TextStream]:
    """The output of a stream after each piece and at the end; a token is a piece of bytes."""
    made = TextStream(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"), stop)
    shown = []
    for i in range(len(pieces)):
        shown.append(made.push(i))
        if made.stopped:
            return shown, made
    return [*shown, made.finish()], made


def test_multi_byte_characters_are_shown_whole() -> None:
    shown, made = stream([b"m", b"\xc3", b"\xbc", b"de ", b"\xf0\x9f", b"\x98", b"\x80", b"\xff"], [])
    assert shown == ["m", "", "ü", "de ", "", "", "😀", "", "�"]
    assert made.text == "müde 😀�"


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "shown"),
    [
        ([b"one ", b"EN", b"D two"], ["END"], "one ", ["one ", "", ""]),
        ([b"one EN", b"T two"], ["END"], "one ENT two", ["one ", "ENT two", ""]),
        ([b"a\n", b"\nb"], ["\n\n"], "a", ["a", ""]),
        ([b"aab", b"aac"], ["aaba", "bb"], "", ["", ""]),
        ([b"x", b"y"], ["z"], "xy", ["x", "y", ""]),
        ([b"1STOP2END"], ["END", "STOP"], "1", ["1"]),
        ([b"ends with EN"], ["END"], "ends with EN", ["ends with ", "EN"]),
    ],
)
def test_text_ends_before_stop_string_split_across_tokens(
    pieces: list[bytes], stop: list[str], text: str, shown: list[str]
) -> None:
    seen, made = stream(pieces, stop)
    assert (made.text, seen) == (text, shown)
    assert "".join(seen) == text
    assert made.stopped == (text != b"".join(pieces).decode())


def test_generation_stops_at_a_stop_string() -> None:
    whole = continued(["hello"], Request(24))[0]
    stop = whole.text[5:8]
    cut = continued(["hello"], Request(24, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.reason == "stop"


def test_streamed_text_equals_returned_text() -> None:
    pieces: dict[int, str] = {}
    done, _ = Generator(model(), TOKENIZER)(
        PROMPTS, Request(20, Sampling(1.0)), lambda i, piece: pieces.update({i: pieces.get(i, "") + piece})
    )
    assert pieces == {i: completion.text for i, completion in enumerate(done)}


ATTEMPTS: dict[str, Callable[[Any], object]] = {
    "prompts": lambda prompts: continued(prompts, Request(4)),
    "sampling": lambda settings: Sampling(**settings),
    "engine": lambda name: Generator(model(), TOKENIZER, engine=name),
}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("prompts", [], "there is no prompt: give the model a text to continue."),
        ("prompts", [""], "the prompt is empty: give the model a text to continue."),
        ("prompts", ["x" * 64], "the prompt has 64 tokens, but the model's context is 64: shorten it to at most 63."),
        ("prompts", [[3, 260]], "the prompt contains id 260, but the model has ids below 260: leave it out."),
        ("prompts", [[-1]], "the prompt contains id -1, but the model has ids below 260: leave it out."),
        ("sampling", {"temperature": -1.0}, "temperature is -1.0: use 0 (greedy) or a positive number."),
        ("sampling", {"temperature": float("nan")}, "temperature is nan: use 0 (greedy) or a positive number."),
        ("sampling", {"top_k": 0}, "top-k is 0: use at least 1."),
        ("sampling", {"top_p": 0.0}, "top-p is 0.0: use a number above 0 and at most 1."),
        ("engine", "graph", "engine graph replays CUDA graphs, but this device is a CPU: use eager or compile."),
        ("engine", "grpah", "engine grpah does not exist: choose auto, eager, graph or compile."),
    ],
)
def test_impossible_requests_are_refused_in_one_sentence(kind: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        ATTEMPTS[kind](value)
    assert str(refused.value) == message


EXPERTS = {"kind": "moe", "hidden": 8, "experts": 4, "top_k": 2}


@pytest.mark.parametrize("replaced", [False, True])
def test_experts_run_in_a_loop_are_not_captured(replaced: bool) -> None:
    """Experts of another kind are not captured either: rounded ones compute in fp32, in turn."""
    built = model(ffn=EXPERTS)
    for mixture in [module for module in built.modules() if replaced and isinstance(module, MoE)]:
        mixture.experts = torch.nn.Identity()
    assert Generator(built, TOKENIZER).engine == "eager"
    with pytest.raises(ValueError, match="engine compile needs all experts in one product"):
        Generator(built, TOKENIZER, engine="compile")


@pytest.mark.parametrize(("rows", "visited"), [(1, 2), (2, 4), (5, 4)])
def test_bytes_per_step_count_only_experts_rows_can_visit(rows: int, visited: int) -> None:
    built = model(ffn=EXPERTS)
    experts = [p for name, p in built.named_parameters() if ".experts." in name]
    idle = sum(p.numel() * p.element_size() for p in experts) * (4 - visited) // 4
    everything = sum(p.numel() * p.element_size() for p in built.parameters())
    assert weight_bytes(built, rows) == everything - idle


def test_greedy_and_low_temperature_pick_the_top_token() -> None:
    padded = torch.tensor([[0.0, 2.0, 1.0, 9.0], [3.0, 2.0, 1.0, 9.0]])  # the last id is padding
    assert Sampler(Sampling(), [0, 0], 1, 3, CPU)(padded, 0).tolist() == [1, 0]
    logits = torch.randn(3, 257)
    sampler = Sampler(Sampling(temperature=1e-45), [0, 1, 2], 1, 257, logits.device)
    assert torch.equal(sampler(logits, 0), logits.argmax(-1))


@pytest.mark.parametrize("tokens", [1, 4])
def test_decoding_rate_excludes_the_first_token(tokens: int) -> None:
    done, speed = Generator(model(), TOKENIZER)(["ab", "c"], Request(tokens))
    assert speed.new_tokens == sum(len(c.tokens) for c in done) == 2 * tokens
    assert speed.tokens_per_second == 2 * (tokens - 1) / speed.decode_seconds
    assert speed.bytes_per_second == (tokens - 1) * speed.bytes_per_step / speed.decode_seconds


def test_progress_counts_steps() -> None:
    told: list[tuple[int, int]] = []
    Generator(model(), TOKENIZER)(["ab", "c"], Request(4), progress=lambda *now: told.append(now))
    assert told == [(1, 4), (2, 4), (3, 4), (3, 4)]


def test_a_conversation_keeps_its_turns_and_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(model(context=60), TOKENIZER)
    seen: list[str] = []

    def answer(self: Generator, prompts: list[str], request: Request, show: object) -> tuple[list[Completion], None]:
        seen.append(prompts[0])
        return [Completion(text=" yes", reason="stop")], None

    monkeypatch.setattr(Generator, "__call__", answer)
    conversation = Conversation(generator, Request(8, stop=("!",)))
    assert conversation.request.stop == ("!", "\nUser:")
    for line in ("hi", "and?", "well"):
        conversation.say(line)
    assert seen == [
        "User: hi\nModel:",
        "User: hi\nModel: yes\nUser: and?\nModel:",
        "User: and?\nModel: yes\nUser: well\nModel:",
    ]


FOLDED = [row for row in ROWS if row["anchors"] in ("resformer", "nuresformer", "nuresformer with gate", "exoformer")]


@pytest.mark.parametrize("row", FOLDED[::5], ids=name_of)
def test_folding_scales_changes_only_rounding(row: Row) -> None:
    built = residua.build(config_of(row)).double()
    for name, parameter in built.named_parameters():
        if "_scale" in name or "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.7, std=0.3)
    tokens = torch.randint(23, (2, 6))
    with torch.no_grad():
        expected = built(tokens)
        layers = fold_mixing(built)
        torch.testing.assert_close(built(tokens), expected, rtol=0, atol=1e-12)
    writes = row["anchors"].startswith(("resformer", "nuresformer"))
    assert layers == len(built.config.softmax_layers) - writes
    assert not any("current_scale" in name for name, _ in built.named_parameters())
    assert fold_mixing(built) == 0
    attention = {"kind": "softmax", "heads": 2, "gate": "elementwise"}
    dynamic = residua.build(small(attention=attention, anchors={"kind": "exoformer", "mixing": {"kind": "dynamic"}}))
    assert fold_mixing(dynamic) == 0


@pytest.mark.slow
@pytest.mark.parametrize("row", covering(ROWS), ids=name_of)
def test_bfloat16_matrices_run_through_every_component(row: Row) -> None:
    built = residua.build(config_of(row)).eval()
    tokens = torch.randint(23, (2, 6))
    with torch.no_grad():
        expected = built(tokens)
        place(built, CPU, "bfloat16")
        assert built.embed.weight.dtype == torch.bfloat16
        cache = built.new_cache(2, 8)
        logits = torch.cat([built(tokens[:, :4], cache=cache), built(tokens[:, 4:5], cache=cache)], 1)
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - expected[:, :5]).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.15
