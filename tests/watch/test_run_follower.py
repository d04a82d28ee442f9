"""Following a run: half-written lines, restarts, damage and vanished folders, whenever they happen."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from residua.machine import python_environment, this_process
from residua.storage.run import read_metrics
from residua.watch.run_follower import POINTS, Follower
from residua.watch.run_list import RunList, check, find
from tests.watch.runs import STEP, lines, write_crashed, write_result, write_run, write_study


def follow(folder: Path) -> Follower:
    follower = Follower(folder)
    follower.refresh()
    return follower


def column(follower: Follower, name: str, kind: str = "train") -> list[float | None]:
    return follower.curves()[kind][name]


def test_curves_match_the_metrics_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 300)
    follower, records = follow(run), read_metrics(run / "metrics.jsonl")
    for kind, names in (("train", ("step", "loss", "lr", "memory_gib")), ("validation", ("step", "bits_per_byte"))):
        for name in names:
            assert column(follower, name, kind) == [record[name] for record in records if record["kind"] == kind]


def test_start_of_a_branch_is_shown_as_waiting(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    environment = {"sessions": [{"started": "2026-01-01T00:00:00", "branch_of": "longer", "until_step": 20}]}
    (run / "environment.json").write_text(json.dumps(environment))
    assert follow(run).state(0.0) == "waiting"


def test_a_half_written_line_is_read_once_complete(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    follower = follow(run)
    more = lines(30, 21)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(more[:25])
    follower.refresh()
    assert follower.step == 20 and follower.damaged == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write(more[25:])
    assert follower.refresh()
    assert follower.step == 30 and follower.damaged == 0
    assert not follower.refresh()


def test_run_that_rolls_back_shows_no_step_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 200)
    follower = follow(run)
    new = tmp_path / "new"
    new.write_text(lines(100) + lines(120, 101, gain=0.5))
    new.replace(run / "metrics.jsonl")
    follower.refresh()
    assert column(follower, "step") == [1, *range(10, 121, 10)]
    assert any("went back to an earlier step 1 time" in words for words in follower.messages())


def test_a_file_truncated_in_place_is_read_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 200)
    follower = follow(run)
    (run / "metrics.jsonl").write_text(lines(50))
    follower.refresh()
    assert follower.step == 50


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    bad = [b"{nonsense", b"\xff\xfe", b"[1, 2]", b'{"kind": "train"}', b'{"kind": "train", "step": "x"}', b"7"]
    good = json.dumps({"kind": "train", "step": 30, "loss": float("nan"), "smoothed": 2.0, "tokens": 30 * STEP})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join([*bad, b"", b'{"kind": "of tomorrow", "step": 3}', good.encode(), b""]))
    follower = follow(run)
    assert follower.step == 30 and column(follower, "loss")[-1] is None
    assert follower.damaged == len(bad)
    assert "6 lines of metrics.jsonl cannot be read" in follower.messages()
    json.dumps(follower.summary(0.0), allow_nan=False)


def test_a_vanished_folder_keeps_its_curves_and_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 200)
    follower = follow(run)
    run.rename(tmp_path / "elsewhere")
    assert follower.refresh()
    assert follower.state(0.0) == "gone" and follower.step == 200
    assert "was removed" in follower.messages()[0]
    (tmp_path / "elsewhere").rename(run)
    follower.refresh()
    assert follower.state(os.stat(run / "metrics.jsonl").st_mtime) == "training"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_links_and_special_files_are_not_opened(tmp_path: Path, kind: str) -> None:
    run = write_run(tmp_path / "run", 20)
    path = run / "metrics.jsonl"
    secret = path.rename(tmp_path / "secret")
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    follower = follow(run)
    assert follower.step == 0 and follower.problem


def test_a_run_is_training_quiet_or_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 500)
    follower, written = follow(run), os.stat(run / "metrics.jsonl").st_mtime
    assert follower.state(written + 60) == "training"
    assert follower.state(written + 600) == "quiet"
    write_result(run, 500)
    follower.refresh()
    assert follower.state(written + 600) == "quiet", "an old result of a run that was resumed for more steps"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines(1000, 501))
    follower.refresh()
    assert follower.state(written + 600) == "quiet", "its last step is logged, and it is not said to have ended well"
    write_result(run, 1000)
    follower.refresh()
    assert follower.state(written + 600) == "finished"
    (run / "result.json").write_text("{}")  # one that does not state its steps
    follower.refresh()
    assert follower.state(written + 600) == "finished"
    assert Follower(tmp_path / "later").state(0.0) == "waiting"


def test_run_ended_by_its_losses_is_stopped_with_a_reason(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1000)
    write_result(run, 500)  # of the session before
    session = {"started": "2026-11-01T00:00:00+00:00", "stopped": "a loss above its first value"}
    (run / "environment.json").write_text(json.dumps({"sessions": [session]}))
    follower = follow(run)
    assert follower.state(os.stat(run / "metrics.jsonl").st_mtime) == "stopped"
    assert follower.messages()[0] == "a loss above its first value" and "finished" not in follower.messages()
    write_run(tmp_path / "other", 1000, finished=True)
    assert RunList([tmp_path]).news()["title"].endswith(": 0 training, 1 of 2 finished, 1 stopped")


def test_a_run_ended_by_an_error_has_crashed_with_a_reason(tmp_path: Path) -> None:
    run = write_crashed(tmp_path / "run", 300, "RuntimeError: shapes differ")
    follower = follow(run)
    summary = follower.summary(os.stat(run / "metrics.jsonl").st_mtime)
    assert (summary["state"], summary["why"], summary["left"]) == ("crashed", "RuntimeError: shapes differ", None)
    assert follower.messages()[0] == "RuntimeError: shapes differ"
    about = json.loads((run / "environment.json").read_text())
    about["sessions"].append({"started": "2026-11-01T00:00:00+00:00", "from_step": 200})
    (run / "environment.json").write_text(json.dumps(about))
    follower.refresh()
    assert follower.state(0.0) == "training", "it has been resumed"


def test_a_run_whose_process_has_died_has_crashed(tmp_path: Path) -> None:
    run, written = write_run(tmp_path / "run", 300), 0.0
    child = subprocess.run(
        [sys.executable, "-P", "-c", "from residua.machine import this_process as name; print(name())"],
        env=python_environment(), capture_output=True, text=True,
    )  # fmt: skip
    elsewhere = re.sub(r"^\S+", "another-machine", child.stdout.strip())
    for process, state in ((child.stdout.strip(), "crashed"), (this_process(), "training"), (elsewhere, "training")):
        (run / "environment.json").write_text(json.dumps({"sessions": [{"process": process}]}))
        assert follow(run).state(written) == state
    write_result(run, 1000)
    (run / "config.toml").write_text("[train]\nsteps = 300\n")
    assert follow(run).state(written) == "finished"


def test_a_crashed_run_of_a_study_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """Also one that failed before it wrote anything, as with a broken plugin."""
    study = write_study(tmp_path / "study", {"prenorm": 0.0, "mgr": 0.2})
    told = "Traceback (most recent call last):\n  File mine.py, line 3\nValueError: not enough values to unpack\n"
    (study / "logs/mgr-seed1.log").write_text(told)  # it has no folder
    (study / "logs/prenorm-seed1.log").write_text("step 100\nresidua: could not write metrics.jsonl\n")
    (study / "logs/prenorm-seed0.log").write_text("residua: an old trouble\n")  # it has a result
    runs = {run["name"]: run for run in RunList([study]).news()["runs"]}
    assert runs["mgr-seed1"]["state"] == runs["prenorm-seed1"]["state"] == "crashed"
    assert runs["mgr-seed1"]["why"] == "ValueError: not enough values to unpack"
    assert runs["prenorm-seed1"]["why"] == "residua: could not write metrics.jsonl"
    assert runs["prenorm-seed0"]["state"] == "finished"
    os.utime(study / "logs/prenorm-seed1.log", (0, 0))
    assert RunList([study]).news()["runs"][1]["state"] == "training", "it was started again after that line"


def test_untrained_model_folders_do_not_count_for_the_time_left(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 500)
    alone = RunList([tmp_path]).news()["left"]
    for name, weights in (("imported", "checkpoints/step-0"), ("titan", "checkpoints/step-6"), ("quantized", ".")):
        (tmp_path / name / weights).mkdir(parents=True)
        (tmp_path / name / weights / "model.safetensors").touch()
        (tmp_path / name / "config.toml").write_text("[train]\nsteps = 1000\n")
    now = os.stat(run / "metrics.jsonl").st_mtime
    news = RunList([tmp_path], lambda: now).news()
    assert {r["name"]: r["state"] for r in news["runs"]} == {
        "run": "training", "imported": "imported", "titan": "imported", "quantized": "imported"
    }  # fmt: skip
    assert news["left"] == alone and news["title"].endswith(": 1 training, 0 of 1 finished, 3 imported")
    (tmp_path / "titan" / "metrics.jsonl").write_text(lines(10))
    assert RunList([tmp_path], lambda: now).news()["title"].endswith("2 training, 0 of 2 finished, 2 imported")


def test_time_left_is_the_remaining_steps_at_the_last_speed(tmp_path: Path) -> None:
    follower = follow(write_run(tmp_path / "run", 500))
    speed = follower.speed
    assert speed is not None and follower.remaining() == pytest.approx(500 * STEP / speed)
    assert follower.remaining() == pytest.approx(500 * 0.031, rel=0.02)


def test_unreadable_configuration_gives_no_time_left(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 500)
    (run / "config.toml").write_text("[train\n")
    follower = follow(run)
    assert follower.remaining() is None and follower.step == 500


def test_long_curves_are_thinned_with_both_ends(tmp_path: Path) -> None:
    follower = follow(write_run(tmp_path / "run", 3000, every=1))
    steps = column(follower, "step")
    assert len(steps) == POINTS and (steps[0], steps[-1]) == (1, 3000) and steps == sorted(set(steps))


def test_study_shows_runs_by_variant_with_grey_baseline(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", {"prenorm": 0.0, "mgr": 0.2, "anchors": 0.1})
    places = find([study])
    assert [place.name for place in places] == [
        f"{variant}-seed{seed}" for variant in ("prenorm", "mgr", "anchors") for seed in (0, 1)
    ]
    assert [place.place for place in places] == [0, 0, 1, 1, 2, 2]
    news = RunList([study]).news()
    assert [run["state"] for run in news["runs"]].count("finished") == 3
    assert news["runs"][-1]["state"] == "waiting" and news["left"] > 0
    assert news["logs"][0]["lines"][-1] == "\N{REPLACEMENT CHARACTER}[31mnot a colour"


def test_runs_studies_and_folders_containing_them_are_found(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", 20)
    write_study(tmp_path / "runs" / "wiki", {"prenorm": 0.0}, seeds=2)
    (tmp_path / "runs" / "texts").mkdir()
    names = ["one", "wiki/prenorm-seed0", "wiki/prenorm-seed1"]
    assert [place.name for place in find([tmp_path / "runs"])] == names
    assert [place.name for place in find([tmp_path / "runs" / "one", tmp_path / "runs" / "wiki"])] == names
    assert [place.name for place in find([tmp_path / "later"])] == ["later"]


@pytest.mark.parametrize(("name", "reason"), [("nowhere", "is not a folder"), ("empty", "contains no run or study")])
def test_a_folder_without_runs_is_refused_in_one_sentence(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"{name} {reason}: "):
        check([tmp_path / name])


def test_updates_contain_only_changed_curves(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 100) for name in "ab"]
    watched = RunList(runs)
    first = watched.news()
    assert all("curves" in run for run in first["runs"])
    again = watched.news(first["epoch"], first["change"])
    assert not any("curves" in run for run in again["runs"])
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write(lines(110, 101))
    later = watched.news(first["epoch"], first["change"])
    assert ["curves" in run for run in later["runs"]] == [False, True]
    assert all("curves" in run for run in watched.news("another", 99)["runs"])
