"""The sweep over all causal language models of transformers: a few in `make test`, every one in `make nightly`."""

import json

import pytest

from tests.diagnose import sweep
from tests.diagnose.architectures import LEFT_OUT
from tests.nightly import only_nightly

pytest.importorskip("transformers", reason="transformers is not installed")

DISTINCT = ["falcon", "olmo", "deepseek_v32"]
"""Sums in place; norms without gain; sparse attention and experts."""


def recorded() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(sweep.RESULTS.read_text(encoding="utf-8"))["architectures"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", only_nightly(sorted(recorded()), but=DISTINCT))
def test_every_architecture_matches_its_recorded_row(kind: str) -> None:
    """Recorded values equal those of hooks, planted defects are found, and nothing is skipped that was measured."""
    row = sweep.examine(kind)
    assert sweep.faults(row) == []
    for key in ("refused", "sublayers", "attention_layers", "planted", "skipped"):
        assert row.get(key) == recorded()[kind].get(key), key


@pytest.mark.nightly
def test_table_has_every_installed_causal_model() -> None:
    from tests.diagnose.architectures import types

    assert set(recorded()) | set(LEFT_OUT) == set(types())


def test_recorded_rows_have_no_faults_and_clear_refusals() -> None:
    rows = recorded()
    assert len(rows) > 150
    assert {kind: found for kind, row in rows.items() if (found := sweep.faults(row))} == {}
    assert all(str(row["refused"]).endswith(".") for row in rows.values() if "refused" in row)


def test_the_page_is_generated_from_the_results() -> None:
    results = json.loads(sweep.RESULTS.read_text(encoding="utf-8"))
    assert sweep.PAGE.read_text(encoding="utf-8") == sweep.page(results)
