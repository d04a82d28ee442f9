"""Every command refuses damaged files, foreign files and outward links: one sentence, exit code 2, and no change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Say
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return train_run(tmp_path_factory.mktemp("trained"), masking="documents")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of a run to damage; its data is a copy too."""
    shutil.copytree(trained.with_name("data"), tmp_path / "data")
    folder = shutil.copytree(trained, tmp_path / "run")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace(str(trained.with_name("data")), str(tmp_path / "data")))
    return folder


def change(path: Path, edit: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_resume_refuses_a_damaged_environment_file(run: Path, sentence: Say) -> None:
    change(run / "environment.json", lambda content: content.pop("sessions"))
    said = sentence("train", "--resume", "--out", run, "train.steps=5")
    assert said == f"{run}/environment.json has no key sessions: move the file elsewhere to continue without it."


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2 is not valid JSON (column 1: expecting value)"),
        ('{"kind": "train", "step": "1"}', "line 2: step is '1', expected a whole number"),
        ('{"kind": "validation", "step": 1, "loss": NaN, "bits_per_byte": 1}', "line 2: loss is nan, expected a"),
    ],
)  # fmt: skip
def test_a_bad_metrics_line_is_named(run: Path, sentence: Say, line: str, words: str) -> None:
    path = run / "metrics.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest, ""]))
    said = sentence("train", "--resume", "--out", run, "train.steps=5")
    assert f"{path}, {words}" in said and "correct or remove the line, or move the file elsewhere" in said


def test_a_finished_run_without_metrics_has_no_result(run: Path, monkeypatch, capsys) -> None:
    (run / "metrics.jsonl").unlink()
    assert residua(monkeypatch, "train", "--resume", "--out", run) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"residua: {run}/metrics.jsonl has no training or no validation record, so the run has no result: "
        "restore the file, or train longer with train.steps=8."
    )
    assert residua(monkeypatch, "train", "--resume", "--out", run, "train.steps=8") == 0


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda state: state["loader"].pop("epoch"), "state.json has no key loader.epoch"),
        (lambda state: state.update(step=3), "state.json does not fit this run (it is from step 3)"),
        (lambda state: state["loader"].update(position=10**6), "data position 1000000 is outside epoch 0"),
        (lambda state: state.update(rng={"cpu": "00ff"}), "input RNG state size to be 2)"),
        (lambda state: state.update(rng={}), "state.json has no key rng.cpu"),
    ],
)
def test_a_damaged_state_is_named(run: Path, sentence: Say, edit: Callable[[dict], object], words: str) -> None:  # type: ignore[type-arg]
    path = run / "checkpoints" / "step-4" / "state.json"
    change(path, edit)
    said = sentence("train", "--resume", "--out", run, "train.steps=5")
    assert words in said and str(path) in said
    shutil.copytree(path.parent, path.parent.with_name("step-2"))
    advice = f"move {path.parent} elsewhere to continue with {path.parent.with_name('step-2')}, which is complete."
    assert sentence("train", "--resume", "--out", run, "train.steps=5").endswith(advice)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(splits=["train"]), "dataset.json: splits is a list of 1 entry, expected an object"),
        (lambda d: d["splits"]["train"].update(shards=["../secret"]), "refers to '../secret', which is not a file"),
        (lambda d: d["splits"]["validation"].update(shards=["link.bin"]), "link.bin is a link to a file outside its"),
    ],
)  # fmt: skip
def test_every_reader_refuses_a_damaged_dataset(
    run: Path, sentence: Say, tmp_path: Path, edit: Callable[[dict], object], words: str  # type: ignore[type-arg]
) -> None:  # fmt: skip
    data = tmp_path / "data"
    shutil.copy(data / "validation-00000.bin", tmp_path / "secret")
    (data / "link.bin").symlink_to(tmp_path / "secret")
    change(data / "dataset.json", edit)
    for arguments in (
        ("train", "--resume", "--out", run, "train.steps=5"),
        ("eval", run, "--device", "cpu"),
        ("quantize", run, "--out", tmp_path / "q", "--device", "cpu"),
        ("compare", "prenorm", "mgr", "--data", data, "--out", tmp_path / "study"),
    ):
        assert words in sentence(*arguments)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.toml", "config.toml is a link to a file outside its folder: replace it with a copy of"),
        ("tokenizer.json", "tokenizer.json is a link to a file outside its folder"),
        ("checkpoints", "checkpoints is a link to a file outside its folder"),
        ("checkpoints/step-4", "step-4 is a link to a file outside its folder"),
        ("checkpoints/step-4/model.safetensors", "model.safetensors is a link to a file outside its folder"),
    ],
)
def test_every_reader_of_a_run_refuses_links_that_leave_it(
    run: Path, sentence: Say, tmp_path: Path, name: str, words: str
) -> None:
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    commands = {
        "generate": ("generate", run, "--prompt", "a", "--device", "cpu"),
        "eval": ("eval", run, "--device", "cpu"),
        "export": ("export", run, "--out", tmp_path / "exported"),
        "quantize": ("quantize", run, "--out", tmp_path / "q", "--device", "cpu"),
        "diagnose": ("diagnose", run, "--out", tmp_path / "d", "--device", "cpu"),
        "train": ("train", "--resume", "--out", run, "train.steps=5"),
    }
    for arguments in commands.values():
        assert words in sentence(*arguments)


def test_resume_refuses_linked_environment_and_metrics_files(run: Path, sentence: Say, tmp_path: Path) -> None:
    for name in ("environment.json", "metrics.jsonl", "tensorboard"):
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
        assert f"{name} is a link to a file outside" in sentence("train", "--resume", "--out", run, "train.steps=5")
        (run / name).unlink()
        (tmp_path / name).rename(run / name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends = 3", "extends = 3 should be the name of a preset: `residua presets` lists them."),
        ("model = 3", "model = 3 should be a table of keys."),
        ("self = 1\nextends = 'tiny'", "self = 1 is not a known key"),
    ],
)
def test_a_run_file_with_wrong_types_is_named(sentence: Say, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "my.toml").write_text(text)
    assert f"{tmp_path}/my.toml: {words}" in sentence("train", tmp_path / "my.toml", "--out", tmp_path / "new")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("variants = 3", "variants = 3 should be a table or a list of names: `residua compare --list` shows them."),
        ("variants = [3]", "variants = a list of 1 entry should be a table or a list of names"),
        ("variants = {a = 3}", "variants.a = 3 should be a list."),
        ("variants = ['mgr', 'prenorm']\nseeds = 0", "seeds = 0 should be a list such as [0, 1, 2], or a number of "
            "seeds"),
        ("variants = ['mgr', 'prenorm']\nseeds = true", "seeds = True should be a list"),
        ("variants = ['mgr', 'prenorm']\nseeds = ['a']", "seeds.0 = 'a' is invalid"),
        ("variants = ['mgr', 'prenorm']\nmatch = 3", "match = 3 should be a table of keys."),
    ],
)  # fmt: skip
def test_a_study_file_with_wrong_types_is_named(sentence: Say, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "study.toml").write_text(text)
    assert f"{tmp_path}/study.toml: {words}" in sentence("compare", tmp_path / "study.toml", "--out", tmp_path / "new")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (3, "weight_map.'model.norm.weight' is 3, expected a text"),
        ("../secret", "refers to '../secret', which is not a file inside it"),
        ("link.safetensors", "link.safetensors is a link to a file outside its folder"),
        ("gone.safetensors", "gone.safetensors does not exist"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "residua"])
def test_every_reader_of_an_index_refuses_paths_that_leave_it(
    trained: Path, sentence: Say, tmp_path: Path, monkeypatch, kind: str, name: object, words: str
) -> None:
    """The folder is refused before transformers, or we, open any weights."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    (folder / "link.safetensors").symlink_to(tmp_path / "secret")
    model = {"vocab_size": 320, "context": 32, "layers": 1, "width": 16, "attention": {"kind": "softmax", "heads": 2}}
    config = {"model_type": kind, "residua": {**model, "ffn": {"kind": "relu2", "hidden": 32}}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    shutil.copy(trained / "tokenizer.json", folder)
    diagnose = ("diagnose", folder, "--out", tmp_path / "d", "--device", "cpu")
    if kind == "llama":
        pytest.importorskip("transformers", reason="transformers is not installed")
        if name != "link.safetensors":
            (folder / "link.safetensors").unlink()
        assert words in sentence(*diagnose)
        return
    for arguments in (
        diagnose,
        ("generate", folder, "--prompt", "a", "--device", "cpu"),
        ("eval", folder, "--data", trained.with_name("data"), "--device", "cpu"),
        ("export", folder, "--out", tmp_path / "exported"),
        ("quantize", folder, "--out", tmp_path / "q", "--data", trained.with_name("data"), "--device", "cpu"),
    ):
        assert words in sentence(*arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": []}, "model_type = [] is not a supported family"),
        ({"rope_parameters": {"rope_type": []}}, "rope_type = [] is not supported"),
        ({"hidden_size": "16"}, "config.json: hidden_size is '16', expected a whole number"),
        ({"hidden_size": 10**30}, "config.json: hidden_size is 10000000"),
    ],
)
def test_import_refuses_a_configuration_with_wrong_types(
    sentence: Say, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    keys = {
        "model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(keys | changes))
    assert words in sentence("import", tmp_path / "theirs", "--out", tmp_path / "ours")
