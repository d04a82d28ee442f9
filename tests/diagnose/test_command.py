"""The command: it writes a report and prints a summary, and answers each mistake with one clear sentence."""

import html
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import residua
from residua.cli.diagnose import app
from residua.config.run import RunConfig
from residua.config.settings import to_toml
from residua.data import Dataset, Tokenizer, open_corpus, prepare
from residua.diagnose import Diagnosis, diagnose
from residua.diagnose.folder import first_sentences
from residua.diagnose.text import open_text, sample
from residua.storage.hugging_face import AGAIN
from tests.diagnose import planted

pytestmark = pytest.mark.slow

WORDS = "depth is how far the layers of a model talk to each other, and so on. " * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS, encoding="utf-8")
    return path


def write_run(folder: Path, **tables: object) -> Path:
    """A run folder as training leaves it: configuration, tokenizer, one checkpoint."""
    config = planted.config(vocab_size=264, **tables)
    run = RunConfig(model=config.model_dump(exclude_none=True))
    torch.manual_seed(0)
    checkpoint = folder / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(run.model_dump(exclude_none=True)), encoding="utf-8")
    save_file({k: v.detach() for k, v in residua.build(config).named_parameters()}, checkpoint / "model.safetensors")
    (checkpoint / "state.json").write_text(json.dumps({"validation_loss": 1.0}))
    Tokenizer.bytes().save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(
        app, [*map(str, arguments), "--tokens", "64", "--device", "cpu"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_run_diagnosis_prints_ten_lines_and_writes_to_its_folder(run: Path, text: Path) -> None:
    output = shown(run, "--text", text)
    made = Diagnosis.read(run / "diagnosis.json").models[0]
    assert (run / "report.html").exists()
    assert 6 <= len(made.summary) <= 10
    assert all(line in output for line in made.summary)
    assert made.text.sequences == 2 and made.text.length == 32 and made.text.source == str(text)


def test_several_models_share_one_page(run: Path, text: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "mgr", topology={"kind": "multi_gate", "streams": 3})
    made = diagnose([run, other], tmp_path / "both", text=text, tokens=64, ablations="all", ablation_tokens=64)
    assert [m.name for m in made.models] == ["run", "mgr"]
    assert {a.kind for a in made.models[1].ablations} == {"layer", "layers", "sublayer", "head", "stream", "uniform"}
    assert "Inside run and mgr" in (tmp_path / "both" / "report.html").read_text(encoding="utf-8")


def test_runs_with_the_same_name_keep_their_own_telemetry(text: Path, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "runs" / "m") for parent in "AB"] + [write_run(tmp_path / "B" / "other")]
    records = [{"kind": "telemetry", "step": n, "tokens": 64 * n, "figures": {"peak": [1.0, 2.0]}} for n in (1, 2)]
    (runs[1] / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    made = diagnose(runs, tmp_path / "out", text=text, tokens=64, ablations="none")
    assert [m.name for m in made.models] == ["A/runs/m", "B/runs/m", "other"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "While B/runs/m trained" in page and "While A/runs/m trained" not in page


def test_a_folder_named_twice_is_numbered(run: Path, text: Path, tmp_path: Path) -> None:
    made = diagnose([run, run.parent / "." / run.name], tmp_path / "out", text=text, tokens=64, ablations="none")
    assert [m.name for m in made.models] == ["run (1)", "run (2)"]


def test_a_run_without_softmax_layers_is_reported(text: Path, tmp_path: Path) -> None:
    mixer = {"kind": "gated_deltanet", "key_heads": 2, "value_heads": 2, "head_dim": 8}
    run = write_run(tmp_path / "linear", attention=mixer)
    made = diagnose([run], tmp_path / "out", text=text, tokens=64).models[0]
    assert made.attention == [] and "no layer of this model uses softmax attention" in made.skipped[0]
    assert made.sites[0].kind == "linear attention"


def spoil(run: Path) -> None:
    path = run / "checkpoints" / "step-1" / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, path)


MISTAKES = {
    "no such folder": (lambda run, text: run.rename(run.with_name("gone")), "does not exist"),
    "no model": (lambda run, text: (run / "config.toml").unlink(), "is not a model folder"),
    "no tokenizer": (lambda run, text: (run / "tokenizer.json").unlink(), "has no tokenizer"),
    "short text": (lambda run, text: text.write_text("too short"), "gives 9 tokens, too few for one sequence of 32"),
    "no text": (lambda run, text: text.unlink(), "is neither a text file nor a prepared dataset"),
    "binary text": (lambda run, text: text.write_bytes(b"\xff\xfe\x00"), "is not UTF-8 text"),
    "broken weights": (lambda run, text: spoil(run), "weight norm.weight is not finite"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_clear_sentence(mistake: str, run: Path, text: Path, tmp_path: Path) -> None:
    make, words = MISTAKES[mistake]
    make(run, text)
    with pytest.raises(ValueError, match=words) as error:
        diagnose([run], tmp_path / "out", text=text, tokens=64)
    assert "\n" not in str(error.value)


def test_wrong_options_suggest_valid_ones(run: Path) -> None:
    for arguments, words in (
        (["--ablations", "heads"], "choose none, layers or all"),
        (["--device", "tpu"], "choose auto, cpu or cuda"),
        (["--length", "64"], "longer than the model's context of 32"),
    ):
        result = CliRunner().invoke(app, [str(run), *arguments])
        assert result.exit_code and words in str(result.exception)


def test_a_tokenizer_of_another_model_is_refused(run: Path, text: Path, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "other")
    Tokenizer.train([WORDS + "".join(map(chr, range(1000, 3000)))], 400).save(folder / "tokenizer.json")
    text.write_text("".join(map(chr, range(1000, 3000))), encoding="utf-8")
    with pytest.raises(ValueError, match=r"put the model's own tokenizer\.json into its folder"):
        diagnose([folder], tmp_path / "out", text=text, tokens=640)


FOREIGN = {
    "unknown": ({"model_type": "no-such-model"}, "model.safetensors", "cannot be opened as a causal .*[.`]$"),
    "pickled": ({"model_type": "llama"}, "pytorch_model.bin", rf"model\.safetensors does not exist: {AGAIN}\.$"),
    "with code": (
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        "model.safetensors", r"needs its own Python code .* Residua runs no code from a model folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_unreadable_foreign_folder_gives_one_sentence(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config, weights, words = FOREIGN[case]
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save = torch.save if weights.endswith(".bin") else save_file
    save({"weight": torch.zeros(1)}, tmp_path / weights)
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=words) as error:
        diagnose([tmp_path], tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


def test_foreign_messages_are_cut_only_between_sentences() -> None:
    long = "word " * 60 + "end."
    assert first_sentences(ValueError(f"{long} More.")) == long
    assert first_sentences(ValueError(f"Short.\n{long}")) == "Short."
    assert first_sentences(ValueError("One. Two.")) == "One. Two."
    assert first_sentences(KeyError()) == "KeyError"


def test_sequences_begin_with_the_tokenizers_prefix(run: Path, text: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.bytes()
    begin = tokenizer.end_of_text
    special = [("<|endoftext|>", begin)]
    tokenizer.backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=special)
    tokenizer.save(run / "tokenizer.json")
    made = diagnose([run], tmp_path / "out", text=text, tokens=64, ablations="none").models[0]
    assert made.text.prefix == [begin]


def test_a_page_of_another_command_is_not_replaced(run: Path, text: Path) -> None:
    (run / "report.html").write_text("what quantizing cost")
    with pytest.raises(
        ValueError, match=r"report\.html was not written by a diagnosis: choose another folder with --out"
    ):
        shown(run, "--text", text)
    assert (run / "report.html").read_text() == "what quantizing cost"
    assert not (run / "diagnosis.json").exists()


def test_folder_of_unrelated_files_is_refused(run: Path, text: Path) -> None:
    with pytest.raises(ValueError, match=r"has text\.txt but no diagnosis: choose another --out"):
        diagnose([run], text.parent, text=text, tokens=64)
    assert not (text.parent / "diagnosis.json").exists()


def test_diagnosis_can_be_repeated_and_placed_next_to_others(run: Path, text: Path, tmp_path: Path) -> None:
    for out in (run, run, tmp_path / "pages" / "one", tmp_path / "pages", tmp_path / "pages"):
        diagnose([run], out, text=text, tokens=64, ablations="none")
        assert (out / "report.html").exists()


def test_diagnosis_of_other_models_does_not_replace_a_runs_own(run: Path, text: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other")
    diagnose([run], run, text=text, tokens=64, ablations="none")
    own = (run / "diagnosis.json").read_bytes()
    for models in ([other], [run, other]):
        with pytest.raises(ValueError, match=r"run is a model folder with a diagnosis of other models: choose"):
            diagnose(models, run, text=text, tokens=64, ablations="none")
    assert (run / "diagnosis.json").read_bytes() == own
    moved = run.rename(tmp_path / "moved")
    diagnose([moved], moved, text=text, tokens=64, ablations="none")
    for _ in range(2):
        diagnose([moved, other], other, text=text, tokens=64, ablations="none")
    with pytest.raises(ValueError, match=r"other models: .*, or delete its diagnosis\.json and report\.html\.$"):
        diagnose([other], other, text=text, tokens=64, ablations="none")
    (other / "diagnosis.json").unlink()
    (other / "report.html").unlink()
    diagnose([other], other, text=text, tokens=64, ablations="none")


def test_the_summary_names_the_text(run: Path, text: Path, tmp_path: Path) -> None:
    made = diagnose([run], tmp_path / "a", text=text, tokens=64, ablations="none").models[0]
    assert f"on 64 tokens of {text}, 2 sequences of 32." in made.summary[0] and made.ablations == []
    made = diagnose([run], tmp_path / "b", tokens=64, ablations="none").models[0]
    corpus = "of the embedded corpus (Python standard library, validation part), 2 sequences of 32."
    assert corpus in made.summary[0] and "embedded corpus" in made.text.source


LESSON = "a text of its own, which the run was trained on and is validated on. "


@pytest.fixture
def lesson(tmp_path: Path) -> Dataset:
    (tmp_path / "lesson.txt").write_text(LESSON * 300, encoding="utf-8")
    return prepare(open_corpus([tmp_path / "lesson.txt"], holdout=0.1), tmp_path / "data", "bytes")


def with_data(run: Path, dataset: Dataset) -> Path:
    config = RunConfig.from_toml(run / "config.toml").override([f"data.path='{dataset.path}'"])
    (run / "config.toml").write_text(config.to_toml())
    return run


def test_a_run_is_diagnosed_on_its_own_validation_text(run: Path, lesson: Dataset, tmp_path: Path) -> None:
    with_data(run, lesson)
    output = shown(run, "--ablations", "none", "--out", tmp_path / "out")
    source = f"the text of run ({lesson.path}, validation part)"
    assert f"on 64 tokens of {source}, 2 sequences of 32." in output
    assert html.escape(source) in (tmp_path / "out" / "report.html").read_text()
    sizes = {"tokens": 64, "length": 32, "context": 32, "vocabulary": 264}
    tokens = sample(Tokenizer.load(run), text=open_text(None, [run]), **sizes).tokens
    first = lesson.split("validation").read(0, 66)
    assert tokens.tolist() == [first[:32].tolist(), first[33:65].tolist()]


def test_a_prepared_dataset_works_with_any_tokenizer(run: Path, lesson: Dataset, tmp_path: Path) -> None:
    text = open_text(lesson.path, [run])
    assert text.name == f"a dataset ({lesson.path}, validation part)"
    other = Tokenizer.train([LESSON], 270)
    assert other.hash != lesson.tokenizer_hash
    own, cut_anew = ([i for piece in text.pieces(t) for i in piece] for t in (Tokenizer.bytes(), other))
    assert len(cut_anew) < len(own) == lesson.split("validation").tokens
    assert other.decode(cut_anew) == Tokenizer.bytes().decode(own)
    made = diagnose([run], tmp_path / "out", text=lesson.path, tokens=64, ablations="none").models[0]
    assert made.text.source == text.name


def test_a_dataset_without_validation_uses_its_training_part(run: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(LESSON * 9)
    prepare(open_corpus([tmp_path / "t.txt"], holdout=0), tmp_path / "data", "bytes")
    assert open_text(tmp_path / "data", [run]).name.endswith("training part)")


def test_a_dataset_that_moved_is_requested_by_name(run: Path, lesson: Dataset) -> None:
    with_data(run, lesson)
    lesson.path.rename(lesson.path.with_name("elsewhere"))
    with pytest.raises(ValueError, match=r"the text of .*run, no longer exists: name a text or a dataset"):
        diagnose([run], run, tokens=64)
