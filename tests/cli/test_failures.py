"""A person's mistake ends in one sentence; a bug in a plugin in its file, its line and its traceback."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from residua.config import plugins
from residua.config.choices import TopologyChoice
from residua.config.run import RunConfig
from residua.config.settings import PLUGINS, ConfigError
from residua.data import Dataset
from residua.distributed import convert
from residua.distributed.world import Ranks
from residua.errors import TRACEBACK, UserError
from residua.files import WriteError
from residua.model.topology import TOPOLOGIES
from residua.report.failure import describe, last_words, tell
from residua.storage.run import read_metrics
from residua.study import StudyConfig
from residua.study.plan import make_plan
from residua.study.train_runs import run_plan
from residua.study.worker_pool import Request, TrainingProcess
from tests.forked import fork_workers
from tests.nightly import only_nightly
from tests.study.conftest import dataset as dataset
from tests.study.conftest import study as study
from tests.study.test_train_runs import Quiet
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow

ERRORS = ["ValueError", "FileNotFoundError", "ImportError", "KeyError", "TypeError", "RuntimeError"]
ERRORS += ["ZeroDivisionError"]
PLACES = ["open", "step", "reset_parameters"]
PAIRS = [(place, error) for place in PLACES for error in ERRORS]
QUICK = PAIRS[::4]
SOURCE = """
import builtins, os
from typing import Literal

from residua import ModelConfig
from residua.config.choices import TopologyChoice
from residua.errors import UserError
from residua.model.topology import Topology, register_topology


class PlantedChoice(TopologyChoice):
    kind: Literal["planted"] = "planted"
    at: str = ""
    error: str = "ValueError"

    def check(self, layers):
        if self.at == "check":
            first, second = (layers,)  # at check
        if self.at == "refusal":
            raise UserError("topology.at = 'refusal' is refused: choose another.")


class Planted(Topology):
    def __init__(self, config, sublayers, width):
        super().__init__()
        self.at, self.error = config.at, getattr(builtins, config.error)
        self.reset_parameters()

    def reset_parameters(self):
        if self.at == "reset_parameters":
            raise self.error("planted")  # at reset_parameters
        if self.at == "ours":
            ModelConfig.preset("nowhere")  # at ours

    def open(self, x):
        if self.at == "open":
            raise self.error("planted")  # at open
        return x, (x,)

    def step(self, k, y, state):
        if self.at == "step":
            raise self.error("planted")  # at step
        h = state[0] + y
        return h, (h,)


register_topology(PlantedChoice, Planted)
if os.environ.get("ONLY_IN", str(os.getpid())) != str(os.getpid()):
    raise ValueError("planted")  # at import
"""


def line_of(place: str) -> int:
    return 1 + next(n for n, line in enumerate(SOURCE.splitlines()) if line.endswith(f"# at {place}"))


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Iterator[Path]:
    """RESIDUA_PLUGINS names a topology that fails where its table says."""
    file = tmp_path_factory.mktemp("plugin") / "planted.py"
    file.write_text(SOURCE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLUGINS, str(file))
        plugins.load_plugins()
        yield file
    choice = plugins._MEMBERS[TopologyChoice].pop("planted")
    plugins._ADAPTERS.pop(TopologyChoice, None)
    TOPOLOGIES.pop(choice)
    sys.modules.pop("planted")
    plugins._loaded.discard(str(file))
    plugins._packages.discard("planted")
    plugins._files.pop("planted")


@pytest.fixture(scope="module")
def run(plugin: Path, tmp_path_factory) -> Path:
    """A run of the plugin that did not fail."""
    return train_run(tmp_path_factory.mktemp("run"), topology={"kind": "planted"})


@pytest.fixture
def untried(monkeypatch) -> None:
    """Skip the trial of plugins, as for a large part: the error occurs in training."""
    monkeypatch.setattr("residua.train.start.check_plugins", lambda config: None)


def planted(place: str, error: str = "ValueError") -> list[str]:
    return [f"model.topology.at={place}", f"model.topology.error={error}"]


def check(said: str, plugin: Path, place: str, error: str) -> None:
    """The first line names file, line and error, and the traceback follows it."""
    words = "'planted'" if error == "KeyError" else "planted"
    heading = f"residua: the plugin {plugin}, line {line_of(place)}: {error}: {words}\n"
    assert heading in said, said
    after = said.partition(heading)[2]
    assert after.startswith("Traceback (most recent call last):\n"), said
    assert f'File "{plugin}", line {line_of(place)}, in ' in after and "typer" not in after, said


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_plugin_error_in_its_trial_shows_file_and_line(place, error, plugin, run, tmp_path, monkeypatch, capsys):
    config = run / "config.toml"
    assert residua(monkeypatch, "train", config, *planted(place, error), "--out", tmp_path / "out") == 1
    said = capsys.readouterr().err
    check(said, plugin, place, error)
    assert "This was the trial of the topology 'planted'" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", ERRORS)
def test_plugin_error_on_import_shows_file_and_line(error: str, tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "fails_at_once.py"
    file.write_text(f"import math\n\nraise {error}('planted')\n", encoding="utf-8")
    monkeypatch.setenv(PLUGINS, str(file))
    assert residua(monkeypatch, "presets", "tiny") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"residua: the plugin {file}, line 3: {error}: "), said
    assert f'File "{file}", line 3, in <module>' in said


def test_plugin_with_a_syntax_error_shows_its_line(tmp_path: Path, monkeypatch, capsys) -> None:
    below = tmp_path / "unread_package" / "below.py"
    below.parent.mkdir()
    (below.parent / "__init__.py").touch()
    below.write_text("def f(:\n", encoding="utf-8")
    (tmp_path / "unread.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for plugin, code, words in (
        (str(tmp_path / "unread.py"), 1, f"the plugin {tmp_path / 'unread.py'}, line 2: SyntaxError: "),
        ("unread_package.below", 1, f"the plugin {below}, line 1: "),
        ("no_such_plugin", 2, ""),
    ):
        monkeypatch.setenv(PLUGINS, plugin)
        assert residua(monkeypatch, "presets", "tiny") == code
        said = capsys.readouterr().err
        assert f"residua: {words}" in said and ("Traceback" in said) == (code == 1)


def test_syntax_error_elsewhere_is_not_blamed_on_a_plugin(plugin: Path) -> None:
    for file in ("<string>", "/elsewhere/planted.py"):
        with pytest.raises(SyntaxError) as caught:
            compile("def f(:", file, "exec")
        assert plugins.plugin_place(caught.value) is None
    with pytest.raises(SyntaxError) as caught:
        compile("def f(:", str(plugin), "exec")
    assert str(plugins.plugin_place(caught.value)) == f"{plugin}, line 1"


@pytest.mark.usefixtures("untried")
def test_run_that_failed_early_restarts_in_its_folder(
    plugin: Path, run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    command = ["train", run / "config.toml", "--out", tmp_path / "out"]
    for error in ERRORS[:3]:
        assert residua(monkeypatch, *command, *planted("step", error)) == 1
        check(capsys.readouterr().err, plugin, "step", error)
    (tmp_path / "out" / "metrics.jsonl").write_text('{"kind": "note", "step": 1}\n')
    assert residua(monkeypatch, *command, "model.width=32") == 0
    assert "starting again at step 1" in capsys.readouterr().out
    assert RunConfig.from_toml(tmp_path / "out/config.toml").model.width == 32
    assert read_metrics(tmp_path / "out" / "metrics-lost-1.jsonl") == [{"kind": "note", "step": 1}]
    assert residua(monkeypatch, *command) == 2
    assert "out is not empty: choose another --out" in capsys.readouterr().err


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("case", only_nightly(PAIRS, QUICK), ids=" ".join)
def test_plugin_error_in_a_study_is_in_the_log_of_its_run(
    case: tuple[str, str], plugin: Path, run: Path, tmp_path: Path, capsys
) -> None:
    place, error = case
    config = RunConfig.from_toml(run / "config.toml").override(planted(place, error))
    (tmp_path / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        TrainingProcess(lambda words: None).train(Request(str(tmp_path / "run.toml"), str(tmp_path / "run"), ""))
    assert end.value.code == 1
    check(capsys.readouterr().err, plugin, place, error)


@pytest.mark.usefixtures("untried")
def test_failed_study_runs_name_the_line_and_restart(
    plugin: Path, study: StudyConfig, dataset: Dataset, tmp_path: Path, monkeypatch
) -> None:
    fork_workers(monkeypatch)
    own = ("model.topology.kind=planted",)
    variants = {"plain": own, **{at: (*own, f"model.topology.at={at}") for at in ("open", "step")}}
    changes = (*study.set, "model.layers=1", "train.steps=3", "train.schedule.warmup=1")
    about = {"variants": variants, "baseline": "plain", "seeds": (0,), "data": str(dataset.path), "set": changes}
    small = StudyConfig(**{**study.model_dump(), **about, "match": {"kind": "none"}})
    plan = make_plan(small, tmp_path / "out", dataset)
    problems = run_plan(small, plan, tmp_path / "out", Quiet())
    assert [run.variant for run in problems] == ["open", "step"]
    for run, problem in problems.items():
        heading = f"the plugin {plugin}, line {line_of(run.variant)}: ValueError: planted"
        assert f"ended with status 1: {heading} (log: " in problem
        check((tmp_path / "out" / "logs" / f"{run.title}.log").read_text(), plugin, run.variant, "ValueError")

    monkeypatch.setenv("ONLY_IN", str(os.getpid()))
    monkeypatch.setattr(plugins, "_loaded", set())  # the workers import it, and fail
    monkeypatch.delitem(sys.modules, "planted")
    problems = run_plan(small, plan, tmp_path / "out", Quiet())
    assert all(f"line {line_of('import')}: ValueError: planted (log: " in problem for problem in problems.values())
    monkeypatch.undo()
    fork_workers(monkeypatch)

    mended = small.model_copy(update={"variants": {"plain": own, "step": own}})
    monkeypatch.setenv(PLUGINS, str(plugin))
    plan = make_plan(mended, tmp_path / "out", dataset)
    assert run_plan(mended, plan, tmp_path / "out", Quiet()) == {}


def test_our_refusal_names_the_plugin_line_that_caused_it(plugin: Path, run: Path, monkeypatch, capsys) -> None:
    for place in ("ours", "check"):
        assert residua(monkeypatch, "train", run / "config.toml", *planted(place), "--out", "nowhere") == 2
        said = capsys.readouterr().err
        assert said.endswith(f" (the plugin's line: {plugin}, line {line_of(place)}).\n") and said.count("\n") == 1
    assert residua(monkeypatch, "train", run / "config.toml", *planted("refusal"), "--out", "nowhere") == 2
    refused = "residua: model.topology.at = 'refusal' is refused: choose another.\n"
    assert capsys.readouterr().err.endswith(refused)


@pytest.mark.parametrize("arguments", [["--traceback", "presets", "tinny"], ["presets", "tinny", "--traceback"]])
def test_traceback_of_a_mistake_is_shown_on_request(arguments: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setenv(TRACEBACK, "0")
    assert residua(monkeypatch, "presets", "tinny") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert residua(monkeypatch, *arguments) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "residua: preset 'tinny' does not exist: did you mean 'tiny'?"
    assert lines[0].startswith("Traceback") and lines[-1].startswith("residua.config.settings.ConfigError: ")


def test_traceback_after_prompt_option_is_its_value(monkeypatch) -> None:
    from residua.cli.main import take_traceback

    monkeypatch.setenv(TRACEBACK, "0")
    assert take_traceback(["generate", "run", "--prompt", "--traceback"])[-1] == "--traceback"
    assert os.environ[TRACEBACK] == "0"


@pytest.mark.parametrize(
    ("error", "bug"),
    [
        (ConfigError("no"), False),
        (WriteError(Path("x"), OSError(errno.EIO, "broken")), False),
        (OSError(errno.ENOSPC, "full"), False),
        (PermissionError(errno.EACCES, "denied", "x"), False),
        (MemoryError(), False),
        (RuntimeError("CUDA out of memory"), False),
        (PermissionError(errno.EACCES, "denied"), True),
        (FileNotFoundError(errno.ENOENT, "missing", "x"), True),
        (ValueError("no"), True),
        (ModuleNotFoundError("no"), True),
        (RuntimeError("no"), True),
    ],
    ids=repr,
)
def test_only_mistakes_and_full_disks_omit_the_traceback(error: Exception, bug: bool) -> None:
    failure = describe(error)
    assert failure.bug == bug == bool(failure.trace)
    assert failure.sentence.startswith("an unexpected error in Residua, ") == bug


def fail_with(error: str) -> None:
    sys.modules["planted"].Planted(SimpleNamespace(at="reset_parameters", error=error), 1, 1)


def test_hidden_cause_is_part_of_the_traceback(plugin: Path) -> None:
    def fail() -> None:
        try:
            fail_with("KeyError")
        except KeyError:
            raise UserError("it is wrong.") from None

    with pytest.raises(UserError) as met:
        fail()
    check(str(describe(met.value)), plugin, "reset_parameters", "KeyError")


def test_convert_reports_failures_as_the_verbs_do(plugin: Path, run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def converted(source: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["convert", str(source), str(tmp_path / "out")])
        with pytest.raises(SystemExit):
            convert.main()
        return capsys.readouterr().err

    assert converted(tmp_path / "none") == f"residua: {tmp_path / 'none'} is not a folder: name a run folder.\n"
    broken = RunConfig.from_toml(run / "config.toml").override(planted("reset_parameters"))
    monkeypatch.setattr(convert, "saved_config", lambda run: broken)
    check(converted(run), plugin, "reset_parameters", "ValueError")


def test_failing_rank_sends_file_and_line_to_the_others(plugin: Path, monkeypatch) -> None:
    told: list[str] = []
    beat = SimpleNamespace(fail=told.append, stop=lambda finished: None)
    quiet = SimpleNamespace(ignore=lambda: None, restore=lambda: None)
    ranks = SimpleNamespace(heartbeat=beat, _broadcast=told.append, _terminations=quiet)
    ranks._explain = lambda error: Ranks._explain(ranks, error)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    with pytest.raises(RuntimeError) as met:
        Ranks._lead(ranks, lambda: fail_with("RuntimeError"))
    Ranks.__exit__(ranks, None, met.value, None)
    heading = f"the plugin {plugin}, line {line_of('reset_parameters')}: RuntimeError: planted"
    assert told == [heading, heading]


def test_failed_measurement_shows_why_and_the_rest_continues(plugin: Path, capsys) -> None:
    with pytest.raises(TypeError) as met:
        fail_with("TypeError")
    tell(Console(width=400), "run: no diagnosis", met.value)
    said = capsys.readouterr().out
    assert f"✗ run: no diagnosis: the plugin {plugin}, line {line_of('reset_parameters')}: TypeError" in said
    assert "Traceback" in said
    assert last_words("start\nresidua: why\nTraceback\n  File\nTypeError\n") == "why"
    assert last_words("start\nkilled\n") == "killed" and last_words("") == ""


def test_shell_command_shows_the_failing_plugin_line(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("first, second = (1,)\n", encoding="utf-8")
    command = [sys.executable, "-m", "residua", "presets", "tiny"]
    environment = {**os.environ, PLUGINS: str(tmp_path / "fails.py")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    first = done.stderr.splitlines()[0]
    assert done.returncode == 1 and first.startswith(f"residua: the plugin {tmp_path / 'fails.py'}, line 1: ValueError")
