"""Presets train as their papers say: tokens, losses, norms and weight decay; summaries say where ours differ."""

import pytest

from residua.config import presets
from residua.config.run import RunConfig

TOKENS = {"outlier-2b": 120e9, "outlier-7b": 1.2e12, "outlier-24b": 500e9, "mgr": 10.5e9, "exoformer": 10e9,
          "kimi-linear-48b": 1.4e12}  # fmt: skip
"""Sections 3 and 4 of the outlier study, section 4 of MGR (20,000 steps of 512 × 1,024), table 4 of ExoFormer; the
model that Attention Residuals were added to (1 T and 0.4 T tokens, in steps of 8 M)."""


def rows(paper: str) -> dict[str, RunConfig]:
    return {name: RunConfig.find(name) for name in presets.names() if name.startswith(f"{paper}-")}


@pytest.mark.parametrize("paper", TOKENS)
def test_every_row_trains_on_as_many_tokens_as_the_paper(paper: str) -> None:
    for name, run in rows(paper).items():
        assert run.train.steps * run.tokens_per_step == pytest.approx(TOKENS[paper], rel=2e-3), name


def test_only_exoformer_uses_z_loss_and_cautious_decay() -> None:
    for name, run in rows("exoformer").items():
        assert (run.train.z_loss, run.train.optimizer.decay) == (1e-5, "cautious"), name
    for name, run in (rows("outlier") | rows("mgr")).items():
        assert (run.train.z_loss, run.train.optimizer.decay) == (0.0, "plain"), name
        assert not run.model.ffn.mixture or run.train.balance.router_z == 0, name


def test_mgr_decays_the_tied_embedding_as_in_its_table_3() -> None:
    for name, run in rows("mgr").items():
        assert run.train.optimizer.embedding_decay == run.train.optimizer.weight_decay == 0.1, name
    for name, run in rows("recommended").items():
        assert not run.train.optimizer.embedding_decay, name  # as in the studies that chose them


def test_mgr_rows_have_no_qk_norm_and_exoformer_rows_have_one() -> None:
    assert {run.model.softmax.qk_norm for run in rows("mgr").values()} == {"none"}
    assert {run.model.softmax.qk_norm for run in rows("exoformer").values()} == {"rms"}


@pytest.mark.parametrize("row", ["dyt", "dyt-ga", "gated-dyt-ga"])
def test_dyt_replaces_every_norm(row: str) -> None:
    model = RunConfig.find(f"outlier-2b-{row}").model
    assert model.norm.kind in ("dyt", "gated_dyt") and model.softmax.qk_norm == "dyt"


@pytest.mark.parametrize(("row", "norm"), [("", "rmsnorm"), ("-preaffine", "preaffine"), ("-gatednorm", "gatednorm")])
@pytest.mark.parametrize("base", ["outlier-7b-a2b", "outlier-24b-a3b"])
def test_mixture_rows_differ_only_in_the_norm(base: str, row: str, norm: str) -> None:
    run, ga = RunConfig.find(base + row), RunConfig.find(base)
    assert run.model.norm.kind == norm and run.model.softmax.gate == "elementwise"
    assert run.override(["model.norm={kind='rmsnorm'}"]) == ga


def test_summaries_state_deviations_from_the_paper() -> None:
    summary = {name: presets.load(name)["summary"] for name in presets.names()}
    for name in rows("mgr"):
        assert ("bias formula corrected" in summary[name]) == ("independent" in name), name
    wide = RunConfig.find("outlier-2b-full").model.ffn.hidden
    for name, run in rows("outlier-2b").items():
        own = run.model.attention.kind != "softmax" or run.model.softmax.gate != "none"
        assert run.model.ffn.hidden == wide and ("FFN as wide as in row 1" in summary[name]) == own, name
    assert "no batch size" in summary["outlier-2b-full"]
    assert all("batch, rate ours" in summary[f"outlier-{size}"] for size in ("7b-a2b", "24b-a3b"))
