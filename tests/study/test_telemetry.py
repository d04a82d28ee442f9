"""Telemetry of a study's runs: its curves and sentences on the page, and its lines after the last loss."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from residua.diagnose.page import diagnosis_page
from residua.study.figures import telemetry_curves
from residua.study.page import show_saved, study_page
from residua.study.records import TAIL_BYTES, Peaks, latest
from residua.study.results_file import SavedStudy
from residua.study.tables import peak_table
from residua.watch.run_follower import Follower
from tests.diagnose import reports
from tests.docs.commands import load_module
from tests.reproduce.pretend import saved_study, with_peaks
from tests.study.pretend import pretended

GREW = "step 300: the largest |h| before the final norm grew 12-fold in 90 steps"


def records(scale: float, said: str = "") -> list[dict[str, Any]]:
    """A peak that grows with the tokens, at two readers, and one gate."""
    made: list[dict[str, Any]] = []
    for step in range(100, 1001, 100):
        figures = {"peak": [1.0, scale * step], "beta_mean": [None, 0.1], "unknown": [1.0]}
        made.append({"kind": "telemetry", "step": step, "tokens": step * 10, "figures": figures})
    made[2] |= {"said": [said]} if said else {}
    return made


@pytest.mark.slow
def test_the_page_has_telemetry_curves_and_run_warnings(tmp_path: Path) -> None:
    made = pretended(3)
    runs = {name: [*own] for name, own in made.records["mini"].items()}
    for name, own in runs.items():
        own[:] = (replace(run, telemetry=records(1.0 + i, GREW * (name == "mgr"))) for i, run in enumerate(own))
    drawn = telemetry_curves(runs)
    assert list(drawn) == ["peak |h|", "β, mean"]
    *_, line = (trace for trace in drawn["peak |h|"].data if trace.meta["series"] == "mgr")  # the band comes first
    last = list(line.x)[-1], list(line.y)[-1]
    assert last == (10_000, pytest.approx(2000))  # the mean over seeds of the largest over readers
    html = study_page(made.study, made.result, {"mini": runs}, tmp_path).html()
    assert "Inside while training" in html and len(re.findall(re.escape(GREW), html)) == 3
    assert "Inside while training" not in made.page(tmp_path).html()


def test_peaks_are_the_largest_of_all_layers_by_step() -> None:
    made = records(1.23456)
    made[-1]["figures"]["peak"] = [None, None]
    peaks = Peaks.of(made)
    assert (peaks.step[0], peaks.peak[0], peaks.peak[-1], peaks.sink_ratio[0]) == (100, 123.5, None, None)
    assert (peaks.early, peaks.at(0.1), peaks.at(0.15), peaks.at(0.5), peaks.last) == (123.5, 123.5, 246.9, 617.3, None)
    again = peaks.telemetry(10)
    assert Peaks.of(again) == peaks and again[0]["tokens"] == 1000
    assert Peaks.of([]) is None
    many = [{"step": i, "figures": {"peak": [float(i)], "sink_ratio": [2.0]}} for i in range(1000)]
    kept = Peaks.of(many)
    assert kept is not None and len(kept.step) == 60 and (kept.step[0], kept.step[-1]) == (0, 999)
    with pytest.raises(ValueError, match="non-empty lists of the same length"):
        Peaks(step=(1, 2), peak=(1.0,), sink_ratio=(1.0, 1.0))


def test_a_results_file_keeps_peaks_for_the_page(tmp_path: Path) -> None:
    peak_picture = load_module("tools/study_extras.py").peak_picture
    without = saved_study({"prenorm": 3.0, "gatednorm": 2.9, "mgr": 2.8})
    assert peak_picture(show_saved(without)) is None and peak_table(show_saved(without), "tiny") is None
    path = tmp_path / "x.json"
    with_peaks(without, {"prenorm": (2.0, 10.0, 4000.0), "gatednorm": (1.0, 2.0, 1.0)}).write(path)
    saved = SavedStudy.read(path)
    records = saved.records(saved.plan(tmp_path))
    lines = [record.telemetry for run, record in records.items() if run.variant == "prenorm"]
    assert [line["figures"]["peak"] for line in lines[0]] == [[2.0], [10.0], [4000.0]]
    assert list(telemetry_curves({"prenorm": [r for r in records.values() if r.telemetry]})) == [
        "peak |h|", "residual-sink ratio",
    ]  # fmt: skip
    result = show_saved(saved)
    table = peak_table(result, "tiny")
    first, second = ([f"{cell.main} {cell.detail}" for cell in row] for row in table.rows)
    assert first[1:4] == ["2.02 (2 to 2.04)", "10.1 (10 to 10.2)", "4,040 (4,000 to 4,080)"]
    assert first[4:] == ["2e+03× [2e+03, 2e+03]", "400× [400, 400]"]
    assert second[4:] == ["1× [1, 1]", "0.5× [0.5, 0.5]"]
    drawn = peak_picture(result, ["prenorm"])
    assert drawn is not None and ">prenorm<" in drawn and ">gatednorm<" not in drawn and ">1000<" in drawn
    assert ">gatednorm<" in str(peak_picture(result)) and ">mgr<" not in str(peak_picture(result))


@pytest.mark.slow
def test_a_diagnosis_page_shows_telemetry_of_its_run(tmp_path: Path) -> None:
    diagnosis = reports.side_by_side(2)
    one = diagnosis.models[1].name
    html = diagnosis_page(diagnosis, {one: records(1.0, GREW)}).html()
    assert f"While {one} trained" in html and GREW in html and html.count("trained</h2>") == 1


def test_the_latest_loss_is_found_after_long_telemetry_lines(tmp_path: Path) -> None:
    peaks = {"peak": [1.25] * (TAIL_BYTES // 20)}
    long = json.dumps({"kind": "telemetry", "step": 8, "tokens": 1, "figures": peaks}) + "\n"
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 7, "loss": 2.5}\n' + long)
    assert latest(tmp_path) == (8, 2.5)
    path.write_text('{"kind": "train", "step": 7, "loss": 2.5}\n' + 8 * long)
    assert latest(tmp_path) == (8, None)


def test_the_live_page_gets_the_peaks(tmp_path: Path) -> None:
    lines = [{**record, "peak": float(record["step"]), "seconds": 1.0} for record in records(1.0, GREW)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    follower = Follower(tmp_path)
    follower.refresh()
    assert follower.messages()[0] == GREW
    assert follower.damaged == 0 and follower.curves()["telemetry"]["peak"] == [float(line["step"]) for line in lines]
