"""A metric is one class: its value is in diagnosis.json, its sentence in the summary, its figure on the page."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from residua.diagnose import Diagnosis, Finding, ModelDiagnosis, metrics
from residua.diagnose.api import write
from residua.diagnose.metric import Model, Models
from residua.diagnose.page import diagnosis_page
from residua.diagnose.plots import by_layer
from residua.diagnose.schema import with_metrics
from residua.diagnose.sentences import absent
from residua.report import Column, Page
from tests.diagnose import planted

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "diagnosis.md"


(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
DOCUMENTED: dict[str, Any] = {"__name__": "documented"}
exec(EXAMPLE, DOCUMENTED)


class Offset(DOCUMENTED["Offset"]):  # type: ignore[misc]
    """The metric of the page, with everything else that a metric may have."""

    kinds = ("offset_state",)
    defect = "offset state"
    columns = (Column("offset", "largest |mean h|"),)

    def findings(self, model: Model) -> list[Finding]:
        far = [k for k, value in enumerate(model.offset) if value > 10]
        return [Finding(kind="offset_state", where={"state": k}, words=f"state {k} is far from zero") for k in far]

    @classmethod
    def cells(cls, model: Model) -> Sequence[str]:
        return [f"{max(model.offset):.3f}"]

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        figure = by_layer(models, lambda m: list(enumerate(m.offset)), "|mean h|", x="read by sublayer")
        page.section("Offset", "Healthy: near zero.").figure(figure, "One point for each state.")


@pytest.fixture(scope="module")
def made() -> ModelDiagnosis:
    return planted.diagnosed(planted.control(), ablations="none", extra=(Offset,))


@pytest.fixture
def folder(made: ModelDiagnosis, tmp_path: Path) -> Path:
    write(Diagnosis(models=[made, made.model_copy(update={"name": "twin"})]), tmp_path)
    return tmp_path


def test_new_metric_value_is_saved_and_reads_back(folder: Path, made: ModelDiagnosis) -> None:
    offset = json.loads((folder / "diagnosis.json").read_text())["models"][0]["offset"]
    first = planted.control().embed(planted.sample().tokens).detach()
    assert len(offset) == 9 and offset[0] == pytest.approx(abs(float(first.double().mean())), rel=1e-6)
    assert Diagnosis.read(folder / "diagnosis.json", extra=(Offset,)).models[0] == made
    with pytest.raises(ValueError, match="is not a diagnosis of version 1"):
        Diagnosis.read(folder / "diagnosis.json")
    assert "offset" in with_metrics((Offset,)).model_json_schema()["properties"]


def test_new_metric_sentence_is_in_the_summary(made: ModelDiagnosis) -> None:
    assert absent(made).endswith("massive activation, dead layer or offset state was found.")
    assert f"States are off zero by up to {max(made.offset):.3f}." in made.summary


def test_new_metric_figure_and_column_are_on_the_page(folder: Path) -> None:
    html = unescape((folder / "report.html").read_text(encoding="utf-8"))
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", html)
    assert titles[titles.index("Offset") - 1 : titles.index("Offset") + 2] == [
        "Gradient per sublayer", "Offset", "Token and layer similarity",
    ]  # fmt: skip
    section = html[html.index('<section id="offset"') :]
    assert 'class="plot"' in section and "One point for each state." in section
    assert '<th scope="col" class="number">offset</th>' in html


def test_new_metric_accepts_only_findings_of_its_own_kind() -> None:
    model = planted.control()
    model.embed.weight.data += 20
    made = planted.diagnosed(model, ablations="none", extra=(Offset,))
    assert {"kind": "offset_state", "where": {"state": 0}, "words": "state 0 is far from zero"} in [
        finding.model_dump() for finding in made.findings
    ]
    assert "State 0 is far from zero" in " ".join(made.summary)
    with pytest.raises(ValueError, match="findings"):
        ModelDiagnosis.model_validate({key: value for key, value in made.model_dump().items() if key != "offset"})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example of docs/reference/diagnosis.md as a file that appears to be in residua/diagnose/metrics/."""
    (tmp_path / "documented.py").write_text(EXAMPLE, encoding="utf-8")
    monkeypatch.setattr(metrics, "__path__", [*metrics.__path__, str(tmp_path)])
    yield f"{metrics.__name__}.documented"
    sys.modules.pop(f"{metrics.__name__}.documented", None)


def test_the_documented_example_is_found_and_works(module: str) -> None:
    (added,) = set(metrics.find_metrics()) - set(metrics.METRICS)
    assert added.__module__ == module
    made = planted.diagnosed(planted.control(), ablations="none", extra=(added,))
    assert len(made.offset) == 9 and any(line.startswith("States are off zero") for line in made.summary)
    assert "Healthy: near zero at every depth." in diagnosis_page(Diagnosis(models=[made])).html()
