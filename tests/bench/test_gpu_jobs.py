"""tools/gpu_jobs.py: order of jobs, what is left after a failure or the deadline, timings without the others."""

import re
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from residua.bench.step import read_cases
from residua.config.run import RunConfig
from residua.config.variants import is_known
from residua.study.config import StudyConfig
from tests.docs.commands import ROOT, load_module, parse

gpu_jobs = load_module("tools/gpu_jobs.py")


def jobs(**tables: dict[str, object]) -> list[object]:
    return [gpu_jobs.Job(name, **table) for name, table in tables.items()]


def test_a_job_waits_for_others_and_for_memory(tmp_path: Path) -> None:
    note = "echo {0} >> order; sleep 0.3; echo {0} ends >> order"
    made = jobs(
        text={"run": note.format("text")},
        large={"run": note.format("large"), "memory": 80.0},
        other={"run": note.format("other"), "memory": 80.0, "after": ["text"], "environment": {"LETTER": "x"}},
    )
    assert gpu_jobs.run_jobs(made, tmp_path, memory=100, seconds=20)
    lines = (tmp_path / "order").read_text().splitlines()
    assert lines.index("other") > max(lines.index("large ends"), lines.index("text ends"))
    assert lines.index("large") < lines.index("text ends")  # side by side


def test_jobs_that_failed_or_were_ended_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = jobs(
        good={"run": "echo good >> ran"},
        bad={"run": "echo bad >> ran; test -e ready"},
        after={"run": "echo after >> ran", "after": ["bad"]},
        slow={"run": "test -e ready || sleep 60"},
    )
    assert not gpu_jobs.run_jobs(made, tmp_path, memory=1, seconds=1.5)
    assert "after: not run, since bad did not end well" in (said := capsys.readouterr().out)
    assert "not ended: slow" in said and not list(tmp_path.glob("*.pid"))
    (tmp_path / "ready").touch()
    assert gpu_jobs.run_jobs(made, tmp_path, memory=1, seconds=20)
    first, second, *rest = (tmp_path / "ran").read_text().split()
    assert ({first, second}, rest) == ({"good", "bad"}, ["bad", "after"])


def test_jobs_go_on_if_their_timing_process_was_killed(tmp_path: Path) -> None:
    stop = "kill -STOP $(cat worker.pid); sleep 1; echo timed >> order"
    made = jobs(worker={"run": "sleep 0.5; echo ends >> order"}, timer={"run": f"flock {gpu_jobs.LOCK} sh -c '{stop}'"})
    assert gpu_jobs.run_jobs(made, tmp_path, memory=1, seconds=20)
    assert (tmp_path / "order").read_text().split() == ["timed", "ends"], "not before the lock is free"


def test_other_jobs_run_while_a_studys_model_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.train import turns

    monkeypatch.setattr(gpu_jobs, "SETTLE", 0.0)
    monkeypatch.setattr(turns, "open_turn", lambda *arguments: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(turns.Turn, "ask", lambda turn, steps: [])
    with gpu_jobs.timings_alone(tmp_path) as quiet, turns.open_turn("baseline", [], tmp_path) as baseline:
        for _ in range(2):
            turns.Turn.ask(baseline, 1)
            with pytest.raises(ValueError, match="too large"), turns.open_turn("variant", [], tmp_path):
                assert quiet.lock is None, "it compiles first"
                turns.Turn.ask(baseline, 1)
                assert quiet.lock is not None
                raise ValueError("too large")
            assert quiet.lock is None
    assert turns.open_turn("", []).__class__ is nullcontext, "restored"


def test_other_jobs_stand_still_while_one_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.train import turns

    monkeypatch.setattr(gpu_jobs, "SETTLE", 0.1)
    count = "import time\nwhile True: print(flush=True); time.sleep(0.01)"
    child = gpu_jobs._start(gpu_jobs.Job("other", f'"{sys.executable}" -c "{count}"'), tmp_path)
    log = tmp_path / "other.log"
    while not log.stat().st_size:
        time.sleep(0.05)
    (tmp_path / "starting.pid").touch()  # another job, whose number is not written yet

    def ask(turn: object, steps: int) -> list[float]:
        before = log.stat().st_size
        time.sleep(0.3)
        return [log.stat().st_size - before]

    monkeypatch.setattr(turns.Turn, "ask", ask)
    monkeypatch.setattr(turns.Turn, "end", lambda turn: {})
    with gpu_jobs.timings_alone(tmp_path):
        assert turns.Turn.ask(SimpleNamespace(), 1) == [0]
        turns.Turn.end(SimpleNamespace())
        size = log.stat().st_size
        time.sleep(0.3)
        assert log.stat().st_size > size
    child.kill()
    child.wait()


def test_inference_and_operators_are_timed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.bench import inference, operators
    from residua.study import timing

    monkeypatch.setattr(gpu_jobs, "SETTLE", 0.0)
    held: list[bool] = []
    places = [(inference, "_timed"), (operators, "_time"), *((at, "measure_ceilings") for at in (inference, operators))]
    for place in places:
        monkeypatch.setattr(*place, lambda: [held.append(quiet.lock is not None)])
    with gpu_jobs.timings_alone(tmp_path) as quiet:
        for module, name in places:
            list(getattr(module, name)())
            assert held.pop() and quiet.lock is None
        assert timing.python_command("-m", "x")[2:] == [gpu_jobs.__file__, "-m", "x"], "the same tool times a study"


def test_a_job_larger_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs.toml").write_text('[large]\nrun = "true"\nmemory = 80\n')
    monkeypatch.setattr(sys, "argv", ["gpu_jobs", str(tmp_path / "jobs.toml"), "--memory", "79"])
    with pytest.raises(SystemExit, match="2"):
        gpu_jobs.main()


def test_a_variable_holds_for_one_case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.bench import turns as bench
    from residua.bench.step import read_cases
    from residua.config.run import RunConfig
    from residua.train import turns

    seen = []
    monkeypatch.setattr(bench, "_open", lambda case, *rest: seen.append(turns.python_environment().get("LETTER")))
    with gpu_jobs.timings_alone(tmp_path):
        for case in read_cases(RunConfig.find("tiny"), ["prenorm env:LETTER=x", "mgr"]):
            bench._open(case, tmp_path, 0)
    assert seen == ["x", None]


@pytest.mark.parametrize("name", ["kernels", "studies", "low-precision"])
def test_committed_jobs_name_settings_that_exist(name: str) -> None:
    for job in gpu_jobs.read_jobs(ROOT / "docs/lab/jobs" / f"{name}.toml"):
        for tree in re.findall(r"env:PYTHONPATH=(\$\w+)", job.run):
            assert f"ls -d {tree}/residua && " in job.run, "without it, python would import this checkout"
        if command := re.search(r"(?:^|&& |; )residua (.*)", job.run):
            verb, values = parse([word for word in shlex.split(command[1]) if word != "$TEXTS"])
            for study in re.findall(r"docs/results/studies/\S+toml", command[1]) if verb == "compare" else ():
                assert StudyConfig.from_toml(ROOT / study).variants
            if verb.startswith("bench "):
                for preset in [values["preset"]] if "preset" in values else values.get("presets", []):
                    base = RunConfig.find(preset).override(values.get("overrides") or [])
                    compare = values.get("compare") or "prenorm"
                    cases = compare if isinstance(compare, str) else ",".join(compare)
                    read_cases(base, re.sub(r" env:\S+", "", cases).split(","))


@pytest.mark.parametrize(("name", "variants"), [("finalists", 2), ("strong", 5)])
def test_committed_parts_of_studies_exist(name: str, variants: int) -> None:
    study = StudyConfig.from_toml(ROOT / "docs/lab/jobs" / f"{name}.toml")
    assert len(study.variants) == variants and study.baseline == "prenorm"
    assert all(is_known(entry) for entries in study.variants.values() for entry in entries)
