"""Parameter matching within half a percent, and the refusal where it cannot be."""

from functools import cache

import pytest

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.config.variants import KNOWN, overrides
from residua.model.size import measure
from residua.study.config import MatchDepth, MatchFFN, MatchFLOPs, NoMatch, match
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow


PAIRS = [(base, name) for base in ("mini", "mgr-s-prenorm") for name in KNOWN]
KEPT = [pair for pair in PAIRS if pair[0] == "mini" or pair[1] == "mgr"]


@cache
def base_and_size(name: str) -> tuple[RunConfig, int]:
    run = RunConfig.find(name)
    return run, measure(run.model).parameters


@pytest.mark.parametrize("pair", only_nightly(PAIRS, but=KEPT), ids=str)
def test_every_known_variant_matches_within_half_a_percent(pair: tuple[str, str]) -> None:
    base, name = pair
    run, target = base_and_size(base)
    matched, _ = match(name, run.override(overrides([name], run.model)).model, target, MatchFFN())
    size = measure(matched)
    assert abs((size.parameters - size.tables) / target - 1) <= 0.005


def exoformer(base: ModelConfig) -> ModelConfig:
    return base.override(["anchors.kind=exoformer", "attention.gate=elementwise"])


def test_gates_and_anchors_narrow_the_ffn_with_a_note() -> None:
    base = ModelConfig.preset("mini")
    matched, change = match("exoformer", exoformer(base), measure(base).parameters, MatchFFN())
    width = matched.ffn.hidden
    assert width < base.ffn.hidden and width % 8 == 0
    assert change == f"FFN width {base.ffn.hidden} → {width}"


def test_a_variant_that_fits_or_is_not_matched_is_unchanged() -> None:
    base = ModelConfig.preset("mini")
    for variant, rule in ((base.override(["topology.kind=full_attnres"]), MatchFFN()), (exoformer(base), NoMatch())):
        assert match("variant", variant, measure(base).parameters, rule) == (variant, "")


def test_unmatchable_variants_are_refused_in_one_sentence() -> None:
    base = ModelConfig.preset("tiny").override(["ffn.hidden=8"])
    with pytest.raises(ConfigError, match=r"variant 'exoformer' has [\d,]+ parameters, which cannot be brought within"):
        match("exoformer", exoformer(base), measure(base).parameters, MatchFFN())
    with pytest.raises(ConfigError, match=r"cannot be brought within 0\.0001 % of"):
        match("other", base, measure(base).parameters + 17, MatchFFN(tolerance=1e-6))


def test_depth_matching_drops_layers_first_and_trims_the_rest() -> None:
    base = ModelConfig.preset("mgr-s-prenorm")
    matched, change = match("exoformer", exoformer(base), measure(base).parameters, MatchDepth())
    assert matched.layers < base.layers
    assert abs(measure(matched).parameters / measure(base).parameters - 1) <= 0.005
    assert change.startswith(f"layers {base.layers} → {matched.layers}")


def test_embedding_tables_are_free_unless_counted() -> None:
    base = ModelConfig.preset("mini").override(["vocab_size=1024"])
    variant = base.override(["anchors.kind=value_embeddings"])
    size, plain = measure(variant), measure(base)
    assert size.tables == -(-base.layers // 2) * 1024 * base.width
    assert size.flops_per_token - plain.flops_per_token == 6 * (size.parameters - size.tables - plain.parameters)
    matched = match("value_embeddings", variant, plain.parameters, MatchFFN())
    assert matched == (variant, f"{size.tables:,} in token tables excluded")
    counted, _ = match("value_embeddings", variant, plain.parameters, MatchFFN(tables="counted", tolerance=0.01))
    assert counted.ffn.hidden < base.ffn.hidden
    assert abs(measure(counted).parameters / plain.parameters - 1) <= 0.01


def test_flops_are_matched_with_attention_included() -> None:
    base = ModelConfig.preset("mini")
    target = measure(base).flops_per_token
    matched, change = match("longer", base.override(["context=4096"]), target, MatchFLOPs())
    assert abs(measure(matched).flops_per_token / target - 1) <= 0.005
    assert change == f"FFN width {base.ffn.hidden} → {matched.ffn.hidden} for equal FLOPs"
    assert matched.ffn.hidden < base.ffn.hidden
