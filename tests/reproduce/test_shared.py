"""An entry judged from an existing study: matching of variants to rows, and verdicts on the claims."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli.reproduce import app
from residua.config.settings import ConfigError
from residua.errors import UserError
from residua.reproduce.claims import Verdict
from residua.reproduce.entry import Nothing, Study, load, names
from residua.reproduce.existing_study import NOT_RUN, NOT_THERE, match_rows, share
from residua.reproduce.request import Request, selected
from residua.study.page import show_saved
from residua.study.records import Outliers
from residua.study.results_file import SavedStudy
from tests.reproduce.pretend import saved_study, with_peaks

runner = CliRunner()
MGR = {"prenorm": 3.0, "block_attnres": 2.92, "full_attnres": 2.9, "mgr": 2.95}


RESCALING = {"prenorm": 3.0, "gated": 2.98, "gated_normed": 2.95, "gated_scaled": 2.96}
GATED = {
    "gated": ["gated_attention"],
    "gated_normed": ["gated_attention+gatednorm"],
    "gated_scaled": ["gated_attention+preaffine"],
}


def entry(name: str) -> Study:
    found = load(name)
    assert isinstance(found, Study)
    return selected(found, Request())


def judged(name: str, saved: SavedStudy) -> dict[str, Verdict]:
    return {verdict.claim: verdict for verdict in share(name, saved).verdicts()}


def test_rows_are_matched_by_their_resolved_configuration() -> None:
    independent = ["mgr", "model.topology.gate=independent"]
    saved = saved_study({**MGR, "four_streams": 2.94}, {"four_streams": independent, "mhc_lite": ["mhc_lite"]})
    found = match_rows(entry("004:table1"), saved)
    assert found.variants == {
        "prenorm": "prenorm",
        "block4": "block_attnres",  # 8 sublayers in blocks of 2
        "full_attnres": "full_attnres",
        "mgr_independent": "four_streams",
        "mgr": "mgr",
    }
    assert found.absent == {
        "mhc_lite": NOT_RUN, "block8": NOT_THERE, "mgr8_independent": NOT_THERE, "mgr8": NOT_THERE,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["ffn", "depth", "none"])
def test_parameter_matching_does_not_prevent_a_row_match(kind: str) -> None:
    """The paper removes layers; the study narrows the feed-forward, also removes layers, or does neither."""
    saved = saved_study(
        {"prenorm": 3.0, "combined": 2.9, "exoformer": 2.8, "resformer": 2.95},
        {"combined": ["resformer+gated_attention"], "faster": ["exoformer", "train.optimizer.lr=0.5"]},
        match={"kind": kind},
    )
    assert any(model.matching for model in saved.models) == (kind != "none")
    found = match_rows(entry("000:table1"), saved).variants
    assert found == {"base": "prenorm", "naive": "combined", "exoformer": "exoformer", "resformer": "resformer"}


def test_variant_of_another_depth_or_rate_does_not_match() -> None:
    saved = saved_study({"prenorm": 3.0, "deeper": 2.9, "faster": 2.9},
                        {"deeper": ["mgr", "model.layers=6"], "faster": ["mgr", "train.optimizer.lr=0.5"]})  # fmt: skip
    assert match_rows(entry("004:table1"), saved).variants == {"prenorm": "prenorm"}


def test_row_replacing_another_kind_of_part_does_not_match() -> None:
    """GLU instead of SwiGLU is the paper's row; instead of ReLU² it is another comparison."""
    wide = {"match": {"kind": "none"}}
    found = match_rows(entry("003:fig3"), saved_study({"base": 3.0, "glu": 2.9}, **wide))
    assert found.variants == {"base": "base"}
    swiglu = {**wide, "set": ["train.steps=100", "model.ffn={kind='swiglu', hidden=128}"]}
    found = match_rows(entry("003:fig3"), saved_study({"base": 3.0, "glu": 2.9}, **swiglu))
    assert found.variants["glu"] == "glu"


def test_the_papers_baseline_is_used_wherever_it_is_listed() -> None:
    deep = {"deep": ["prenorm", "model.layers=6"]}
    saved = saved_study({"mgr": 2.9, "deep": 2.8, "prenorm": 3.0}, deep, baseline="mgr", match={"kind": "none"})
    shared = share("004:table1", saved)
    assert shared.rows.variants == {"prenorm": "prenorm", "mgr": "mgr"}
    result = show_saved(shared.saved)
    assert result.baseline == "prenorm"
    (row,) = [row for row in result.variants if row.name == "mgr"]
    assert row.difference is not None and row.difference.value == pytest.approx(-0.1, abs=1e-3)


def test_claims_use_the_verdict_and_interval_of_the_study() -> None:
    saved = saved_study(MGR)
    said = judged("004:table1", saved)
    better = said["Full AttnRes outperforms pre-norm"]
    (row,) = [row for row in show_saved(saved).variants if row.name == "full_attnres"]
    own = f"{row.difference.value:+.4f} [{row.difference.low:+.4f}, {row.difference.high:+.4f}]"
    assert (better.direction, better.size) == ("confirmed", "tiny")
    assert better.found == f"full_attnres against prenorm: validation loss {own}"
    assert better.printed == "-0.0374, above our interval"  # the paper's S, its smallest size
    assert said["At n=4 competitive MGR outperforms Full AttnRes"].direction == "contradicted"
    assert said["Competitive MGR (n=4) outperforms pre-norm"].direction == "confirmed"


def test_claims_about_missing_rows_are_not_shown() -> None:
    said = judged("004:table1", saved_study(MGR, {"mhc_lite": ["mhc_lite"]}))
    more = said["Competitive MGR is better with 8 streams than with 4"]
    assert (more.direction, more.found) == ("not shown", f"mgr8: {NOT_THERE}")
    assert more.printed == "-0.0025"
    assert said["mHC-lite outperforms pre-norm"].found == f"mhc_lite: {NOT_RUN}"


def test_order_with_missing_rows_can_only_be_contradicted() -> None:
    def order(ends: dict[str, float]) -> Verdict:
        return next(iter(judged("004:table1", saved_study(ends)).values()))

    held = order(MGR)
    assert held.direction == "not shown"
    assert "full_attnres against block4" in held.found and f"mgr8, block8, mhc_lite: {NOT_THERE}" in held.found
    assert order({**MGR, "block_attnres": 2.8}).direction == "contradicted"


def test_claims_about_unmeasured_quantities_are_not_shown() -> None:
    said = judged("000:table1", saved_study({"prenorm": 3.0, "exoformer_dynamic": 2.9}))
    accuracy = said["The dynamic variant gains 2.13 points of downstream accuracy over the baseline"]
    assert accuracy.found == "exoformer_dynamic against base: accuracy not measured"
    assert (accuracy.direction, accuracy.magnitude, accuracy.printed) == ("not shown", "not shown", "+2.13")
    lower = said["Dynamic ExoFormer outperforms the base Transformer"]
    assert lower.direction == "confirmed" and "perplexity 0.9049× [0.9047, 0.9052]" in lower.found


def test_outlier_rows_are_matched_by_configuration_not_name() -> None:
    shared = share("003:table1", saved_study(RESCALING, GATED))
    assert shared.rows.variants == {
        "base": "prenorm", "ga": "gated", "ga_gatednorm": "gated_normed", "ga_preaffine": "gated_scaled",
    }  # fmt: skip
    assert any("model.ffn.kind relu2 (swiglu)" in note for note in shared.notes)


PEAKS = {
    "prenorm": (20.0, 40.0, 50.0), "gated": (10.0, 40.0, 30.0),
    "gated_normed": (2.0, 3.0, 3.0), "gated_scaled": (60.0, 6.0, 5.0),
}  # fmt: skip


def test_telemetry_peaks_stand_in_for_missing_outliers() -> None:
    saved = with_peaks(saved_study(RESCALING, GATED), PEAKS)
    lower = judged("003:table1", saved)["(20) against (2): and the outliers"]
    assert lower.direction == "confirmed"
    assert lower.found == "ga_gatednorm against ga: peak activation by telemetry 0.10× [0.10, 0.10]"
    assert lower.printed == "0.15×, above our interval"
    some = Outliers(peak_activation=7.0, sink_ratio=2.0)
    runs = tuple(r if r.variant == "prenorm" else r.model_copy(update={"outliers": some}) for r in saved.runs)
    partly = judged("003:table1", saved.model_copy(update={"runs": runs}))
    assert partly["(20) against (2): and the outliers"] == lower  # one definition for the whole table
    runs = tuple(run.model_copy(update={"outliers": some}) for run in saved.runs)
    every = judged("003:table1", saved.model_copy(update={"runs": runs}))
    same = "ga_gatednorm against ga: peak activation 1.00× [1.00, 1.00]"
    assert every["(20) against (2): and the outliers"].found == same


def test_outlier_growth_can_also_be_judged_from_a_dense_model() -> None:
    saved = with_peaks(saved_study(RESCALING, GATED), PEAKS)
    shared = share("003:fig4", saved)
    assert shared.rows.variants == {"ga": "gated", "ga_gatednorm": "gated_normed", "ga_preaffine": "gated_scaled"}
    assert any("model.attention.kind softmax (hybrid)" in n and "model.ffn.kind relu2 (moe)" in n for n in shared.notes)
    surge, decay, early = shared.verdicts()[-3:]
    assert surge.direction == decay.direction == early.direction == "confirmed"
    assert surge.found.endswith("after the last step / the largest of the first tenth 0.08× [0.08, 0.08]")
    assert decay.found.endswith("at half of the run 0.75× [0.75, 0.75]")
    grown = judged("003:fig4", with_peaks(saved, {**PEAKS, "gated": (10.0, 40.0, 50.0)}))
    assert grown[decay.claim].direction == "contradicted"
    bare = judged("003:fig4", saved_study(RESCALING, GATED))
    assert bare[decay.claim].direction == "not shown" and bare[decay.claim].found.endswith("not measured")


def test_a_model_with_the_papers_mixer_is_preferred() -> None:
    hybrid = {"other": ["hybrid+gated_attention"], "other_normed": ["hybrid+gated_attention+gatednorm"]}
    saved = saved_study({**RESCALING, "other": 2.9, "other_normed": 2.8}, {**GATED, **hybrid})
    assert match_rows(entry("003:fig4"), saved).variants == {"ga": "other", "ga_gatednorm": "other_normed"}


def test_a_claim_about_some_sizes_is_judged_only_at_them() -> None:
    small = saved_study({"base": 3.0, "gatednorm": 2.9})
    found = share("003:table4", small).verdicts()
    assert {(v.direction, v.size) for v in found} == {("not shown", "all")}
    assert found[0].found == "it is about size 2048, and the study pretended has tiny"


def test_each_of_several_sizes_is_judged() -> None:
    sizes = {"scaling": {"sizes": ["tiny", "mini"]}}
    ends = {"prenorm": 3.0, "full_attnres": 2.9, "block_attnres": 2.95}
    shared = share("004:table1", saved_study(ends, **sizes))
    assert "block4" in shared.rows.absent  # block_attnres has 4 blocks at one size and 8 at the other
    said = [verdict for verdict in shared.verdicts() if verdict.claim == "Full AttnRes outperforms pre-norm"]
    assert [(verdict.size, verdict.direction) for verdict in said] == [("tiny", "confirmed"), ("mini", "confirmed")]


@pytest.mark.slow
def test_the_page_states_the_source_of_its_numbers(tmp_path: Path) -> None:
    saved_study(MGR).write(tmp_path / "x.json")
    arguments = ["004:table1", "--study", str(tmp_path / "x.json"), "--out", str(tmp_path / "page")]
    result = runner.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    confirmed = "Full AttnRes outperforms pre-norm (tiny): direction confirmed, magnitude larger than the paper's."
    assert confirmed in result.output
    page, table = ((tmp_path / "page" / name).read_text("utf-8") for name in ("report.html", "results.md"))
    for text in (page, table):
        assert "the study pretended, base tiny (" in text and "seeds 0, 1, 2" in text
        assert "NVIDIA H200" in text and "commit 0123456789ab" in text
        assert "tiny is nearest to the paper&#x27;s S" in text or "tiny is nearest to the paper's S" in text
        assert "2.9066" in text and "2.9011" in text  # Full AttnRes: the paper's loss and ours
        assert NOT_THERE in text
    assert "| Block AttnRes (n=4) | block_attnres |" in table and f"| mHC-lite (n=4) | {NOT_THERE} |" in table
    again = runner.invoke(app, arguments)
    assert "is not an empty folder" in str(again.exception)


@pytest.mark.parametrize(
    ("ends", "arguments", "sentence"),
    [
        ({"prenorm": 3.0, "highway": 2.9}, ["004:table1"], "has no complete run of the rows that 004:table1 compares"),
        (
            {"mgr": 3.0, "full_attnres": 2.9},
            ["004:table1"],
            "with prenorm, and the study pretended has no such variant",
        ),
        (MGR, ["004:fig2"], "diagnoses models, but the results of a study contain none"),
        (MGR, ["004:table2"], "cannot be reproduced: a list of hyper-parameters"),
        (MGR, ["004:table1", "--rows", "mgr9"], "--rows mgr9 is not in this entry"),
        (MGR, ["004:table1", "--seeds", "3"], "trains nothing: leave --seeds out"),
        (MGR, ["004:table1", "--task-dir", "tasks"], "trains nothing: leave --task-dir out"),
        (MGR, ["004:table1", "--calibration", "8"], "trains nothing: leave --calibration out"),
        (MGR, ["004:table1", "--scale", "1/4"], "trains nothing: leave --scale out"),
        (MGR, ["004:table1", "--plan"], "trains nothing: leave --plan out"),
    ],
)
def test_an_unsuitable_study_is_refused_in_one_sentence(
    ends: dict[str, float], arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    saved_study(ends).write(tmp_path / "x.json")
    result = runner.invoke(app, [*arguments, "--study", str(tmp_path / "x.json"), "--out", str(tmp_path / "page")])
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)
    assert not (tmp_path / "page").exists()


def test_a_baseline_without_a_run_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the study pretended has no complete run of it"):
        share("004:table1", saved_study({"mgr": 2.9}, {"prenorm": ["prenorm"]}, baseline="prenorm"))
    result = runner.invoke(app, ["004:table1", "--study", str(tmp_path)])
    assert "--results FILE.json --plan` writes from it" in str(result.exception)
    result = runner.invoke(app, ["--study", "x.json"])
    assert "--study needs an entry" in str(result.exception)


def test_every_judged_entry_compares_with_the_plain_base() -> None:
    """Rows are resolved on top of the baseline's counterpart, which is right if the baseline row changes nothing."""
    found = {name: load(name) for name in names()}
    baselines = {
        name: next(row.variant for row in kept.rows if row.name == (kept.baseline or kept.rows[0].name))
        for name, kept in found.items()
        if not isinstance(kept, Nothing) and kept.claims
    }
    assert {name for name, words in baselines.items() if words not in (("base",), ("prenorm",))} == set()
