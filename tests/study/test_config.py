"""Studies as data: names, files, and mistakes that are refused in one sentence."""

from pathlib import Path

import pytest

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.config.variants import KNOWN, overrides, sublayers_per_block
from residua.study import StudyConfig
from residua.study.config import DEMO
from residua.study.gains import MIN_SEEDS
from residua.study.ladder import MIN_BUDGETS_OF_LAW


def test_a_study_survives_a_toml_round_trip(tmp_path: Path) -> None:
    variants = {"prenorm": ["prenorm"], "mine": ["mgr", "model.topology.streams=2"]}
    scaling = {"sizes": ["tiny", "mini"], "tokens_per_parameter": 20}
    study = StudyConfig(variants=variants, seeds=[3, 5], match={"kind": "depth"}, scaling=scaling)
    (tmp_path / "study.toml").write_text(study.to_toml())
    assert StudyConfig.from_toml(tmp_path / "study.toml") == study


def test_names_become_variants_and_the_first_is_the_baseline() -> None:
    study = StudyConfig(variants=["mgr", "prenorm"], seeds=2)
    assert (study.baseline, study.seeds, study.variants["prenorm"]) == ("mgr", (0, 1), ("prenorm",))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"baseline": "hc"}, "baseline = 'hc' is not one of the variants"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"seeds": 0}, "seeds"),
        ({"variants": {"../up": ["mgr"]}}, "must be usable as a folder name"),
        ({"scaling": {"sizes": ["tiny"]}}, "scaling.sizes"),
        ({"scaling": {"sizes": ["tiny", "x/tiny.toml"]}}, "uses a name twice"),
        ({"scaling": {"sizes": ["tiny", "x/...toml"]}}, "cannot be a folder name"),
        ({"workres": 2}, "did you mean 'workers'"),
        *(({"name": n}, "must be a plain name") for n in ("../../x", "/tmp/x", "..", "", "a\\b", "a\nb")),
    ],
)
def test_an_invalid_study_is_explained_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StudyConfig(**{"variants": ["prenorm", "mgr"], **changes})


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_variant_is_a_valid_run(name: str) -> None:
    base = RunConfig.find("mini")
    base.override(overrides([name], base.model))


def test_combined_names_change_only_their_own_part() -> None:
    base = RunConfig.find("mini")
    model = base.override(overrides(["mgr+exoformer+gatednorm"], base.model)).model
    assert (model.topology.kind, model.anchors.kind, model.norm.kind) == ("multi_gate", "exoformer", "gatednorm")
    assert base.override(overrides(["base"], base.model)) == base


@pytest.mark.parametrize(("layers", "expected"), [(4, 2), (8, 2), (12, 3), (16, 4), (36, 9)])
def test_block_attention_residuals_get_about_eight_blocks(layers: int, expected: int) -> None:
    assert sublayers_per_block(layers) == expected


def test_the_demo_has_enough_seeds_for_a_verdict() -> None:
    study = StudyConfig.from_toml(DEMO)
    assert list(study.variants) == ["prenorm", "block_attnres"]
    assert (len(study.seeds), len(study.ladder)) == (MIN_SEEDS, MIN_BUDGETS_OF_LAW)
    assert (study.workers, study.threads, study.data) == (2, 1, None)
