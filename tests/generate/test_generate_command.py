"""`residua generate` at the command line."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import residua as library
from residua.generate.generator import Generator, Request
from residua.generate.sample import Sampling
from residua.storage.model_folder import open_model
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("generate"))


Generate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def generate(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Generate:
    """`residua generate` of the run, or of another folder: the status and the output."""
    return lambda *arguments, folder=run: (residua(monkeypatch, "generate", folder, *arguments), *capsys.readouterr())


def test_prompt_streams_its_continuation_and_prints_the_speed(run: Path, generate: Generate) -> None:
    status, out, err = generate("--prompt", "depth is", "--tokens", 9, "--temperature", 0)
    text = Generator(*open_model(run))(["depth is"], Request(9))[0][0].text
    assert (status, out) == (0, f"depth is{text}\n")
    size = sum(p.numel() * 4 for p in library.load(run).parameters()) / 1e9
    speed = rf"[\d,.]+ tokens/s, [\d,.]+ GB/s of {re.escape(f'{size:.3g}')} GB of weights"
    assert re.fullmatch(rf"\[9 tokens \(length\), {speed}; prompt: 8 tokens in [\d.]+ s\]\n", err)


def test_no_speed_is_printed_for_a_single_token(generate: Generate) -> None:
    status, _, err = generate("--prompt", "depth is", "--tokens", 1)
    assert status == 0 and re.fullmatch(r"\[1 token \(\w+\); prompt: 8 tokens in [\d.]+ s\]\n", err)


def test_reaching_the_end_of_the_context_is_reported(generate: Generate) -> None:
    """The model's context is 32 tokens, so the longer prompt can have 3 more."""
    status, _, err = generate("--prompt", "x" * 29, "--prompt", "x", "--tokens", 9, "--temperature", 0)
    assert status == 0 and "[12 tokens (end of the model's context, length), " in err


def test_text_ends_at_any_end_id_of_the_models_settings(run: Path, tmp_path: Path, generate: Generate) -> None:
    """A run that came from an import has them in source/."""
    copied = shutil.copytree(run, tmp_path / "run")
    (copied / "source").mkdir()
    ids = list(range(library.load(run).config.vocab_size))
    (copied / "source" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    status, out, err = generate("--prompt", "depth is", "--tokens", 9, folder=copied)
    assert (status, out) == (0, "depth is\n") and err.startswith("[0 tokens (end)")


def test_prompts_of_a_file_run_in_one_batch(run: Path, tmp_path: Path, generate: Generate) -> None:
    (tmp_path / "prompts.txt").write_text("depth is\n\nhow\n")
    settings = ("--tokens", 6, "--top-k", 5, "--top-p", 0.9, "--seed", 4)
    status, out, _ = generate("--file", tmp_path / "prompts.txt", *settings)
    done, _ = Generator(*open_model(run))(["depth is", "how"], Request(6, Sampling(0.8, 5, 0.9, 4)))
    expected = "".join(f"--- {p}\n{c.text}\n" for p, c in zip(["depth is", "how"], done, strict=True))
    assert (status, out) == (0, re.sub(r"[^\x20-\x7e\n\t�]", "�", expected))


@pytest.mark.parametrize("first", ["how far", "x" * 40])
def test_conversation_continues_until_an_empty_line(first: str, generate: Generate, monkeypatch) -> None:
    """Continues after a line that is too long, which is refused."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{first}\nis it\n\n"))
    status, out, err = generate("--chat", "--tokens", 4)
    assert (status, out.count("Model:")) == (0, 2)
    if len(first) == 40:
        assert (err.count("the model's context is 32"), err.count("tokens/s")) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prompt", "a", "--chat"), "--prompt, --file and --chat cannot be combined: give one of them."),
        ((), "no prompt was given: use --prompt TEXT, --file PROMPTS.txt or --chat."),
        (("--prompt", ""), "the prompt is empty: give the model a text to continue."),
        (("--prompt", "x" * 40), "the prompt has 40 tokens, but the model's context is 32: shorten it to at most 31."),
        (("--prompt", "a", "--top-p", "2"), "top-p is 2.0: use a number above 0 and at most 1."),
        (("--prompt", "a", "--seed", str(2**64)), f"seed is {2**64}: use a whole number from 0 to 2**63 - 1."),
        (("--prompt", "a", "--prompt", ""), "the prompt is empty: give the model a text to continue."),
        (("--prompt", "a", "--engine", "fast"), "engine fast does not exist: choose auto, eager, graph or compile."),
        (("--prompt", "a", "--device", "tpu"), "--device is 'tpu': choose auto, cpu or cuda."),
        (("--prompt", "a", "--checkpoint", "worst"), "--checkpoint worst does not exist: choose last or best."),
        (("--file", "nofile.txt"),
         "nofile.txt cannot be read (No such file or directory): --file is a text file with one prompt per line."),
        (("--prompt", "a", "--stop", ""), "a stop string is empty: it would stop before the first token."),
    ],
)  # fmt: skip
def test_mistake_is_reported_in_one_sentence(arguments: tuple[str, ...], sentence: str, generate: Generate) -> None:
    assert generate(*arguments) == (2, "", f"residua: {sentence}\n")


@pytest.mark.parametrize(
    ("broken", "words"),
    [("nowhere", "is not a folder"), ("empty", "holds no model"), ("without tokenizer", "has no tokenizer")],
)
def test_folder_without_a_model_is_refused(broken: str, words: str, tmp_path: Path, generate: Generate) -> None:
    folder = tmp_path / "model"
    if broken != "nowhere":
        folder.mkdir()
    if broken == "without tokenizer":
        (folder / "config.toml").write_text("")
    status, _, err = generate("--prompt", "a", folder=folder)
    assert status == 2 and err.startswith(f"residua: {folder} {words}: ") and err.count("\n") == 1
