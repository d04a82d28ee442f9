"""Short names stand for the rows of the papers' tables: on the paper's base, a name gives the paper's preset."""

from itertools import combinations

import pytest

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.config.variants import KNOWN, changed, overrides

GRAINS = {"e": "", "h": "_headwise", "s": "_scalar"}
PARTS = {"": "", "-qk": "_qk", "-vg": "_vg"}
EXOFORMER = {
    "exoformer-e-nonorm": "exoformer_nonorm",
    "exoformer-e-dynamic": "exoformer_dynamic",
    "exoformer-naive": "resformer+gated_attention",
    **{f"exoformer-{letter}": f"exoformer{grain}" for letter, grain in GRAINS.items()},
    **{
        f"exoformer-nures-{letter}{part}": f"nuresformer{rows}{grain}"
        for letter, grain in GRAINS.items()
        for part, rows in PARTS.items()
    },
}
MGR = {
    "block4": "block4",
    "block8": "block8",
    "full": "full_attnres",
    "mhc-lite": "mhc_lite",
    "independent4": "mgr_independent",
    "independent8": "mgr8_independent",
    "competitive4": "mgr",
    "competitive8": "mgr8",
}
OUTLIER = {
    **{f"clip{limit}": f"clip{limit}" for limit in (10, 100, 1000)},
    "ga-clip10": "gated_attention+clip10",
    "glu": "glu",
    "ga-gatednorm-glu": "gated_attention+gatednorm+glu",
}
ROWS = [
    *(("exoformer-gated", name, preset) for preset, name in EXOFORMER.items()),
    *((f"mgr-{s}-prenorm", name, f"mgr-{s}-{row}") for row, name in MGR.items() for s in "sml"),
    *(("outlier-2b-full", name, f"outlier-2b-{row}") for row, name in OUTLIER.items()),
]


@pytest.mark.parametrize(("base", "name", "preset"), ROWS)
def test_short_names_give_the_rows_of_the_papers(base: str, name: str, preset: str) -> None:
    run = RunConfig.find(base)
    assert run.override(overrides([name], run.model)) == RunConfig.find(preset)


@pytest.mark.parametrize(("layers", "expected"), [(2, 1), (5, 3), (9, 5), (36, 18)])
def test_block4_has_at_most_four_blocks_at_any_depth(layers: int, expected: int) -> None:
    run = RunConfig.find("mini").override([f"model.layers={layers}"])
    topology = run.override(overrides(["block4"], run.model)).model.topology
    assert topology.sublayers_per_block == expected
    assert -(-2 * layers // expected) <= 4


def test_glu_variant_also_changes_the_experts() -> None:
    run = RunConfig.find("mini-moe")
    assert run.override(overrides(["glu"], run.model)).model.ffn.activation == "glu"


def test_two_clipping_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"both set model\.topology\.limit"):
        overrides(["clip10+clip100"], RunConfig.find("mini").model)


def test_kimi_keeps_the_heads_and_quarters_the_latent_width() -> None:
    run = RunConfig.find("mini")
    model = run.override(overrides(["kimi"], run.model)).model
    assert (model.latent.heads, model.latent.head_dim, model.latent.rank, model.latent.positions) == (
        4,
        128,
        128,
        "none",
    )
    assert (model.linear.heads, model.linear.head_dim, model.softmax_layers) == (4, 128, (3, 7))


def topology(name: str) -> dict[str, object]:
    base = RunConfig.find("mini")
    return base.override(overrides([name], base.model)).model.topology.model_dump()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("block3", {"kind": "block_attnres", "sublayers_per_block": 6}),
        ("mgr6", {"kind": "multi_gate", "streams": 6, "gate": "competitive"}),
        ("mgr6_independent", {"kind": "multi_gate", "streams": 6, "gate": "independent"}),
        ("clip250", {"kind": "clipped", "limit": 250.0}),
    ],
)
def test_numbered_names_accept_any_number(name: str, expected: dict[str, object]) -> None:
    layers = RunConfig.find("mini").model.layers
    if "sublayers_per_block" in expected:
        expected = {**expected, "sublayers_per_block": -(-2 * layers // 3)}
    assert expected.items() <= topology(name).items()


def test_numbered_names_combine_and_conflict_like_others() -> None:
    base = RunConfig.find("mini")
    both = base.override(overrides(["mgr6+exoformer"], base.model)).model
    assert (both.topology.kind, both.anchors.kind) == ("multi_gate", "exoformer")
    with pytest.raises(ConfigError, match="'block3' and 'mgr6' both set"):
        overrides(["block3+mgr6"], base.model)


@pytest.mark.parametrize("name", ["block", "block0", "block-1", "glu4", "mgr4_free", "clip1e9"])
def test_a_number_on_an_unnumbered_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a known variant"):
        topology(name)


PAIRS = [("kv_source", "hybrid"), ("block4", "loop"), ("x0", "parcae"), ("xsa", "kimi"), ("nuresformer", "linear"),
         ("linear", "hybrid"), ("glu", "moe"), ("lns", "gatednorm"), ("mgr", "mgr8")]  # fmt: skip
ALL = [*combinations(KNOWN, 2)]


@pytest.mark.parametrize("pairs", [PAIRS, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_the_order_of_names_does_not_matter(pairs: list[tuple[str, str]]) -> None:
    """Both orders give the same model, or both are refused."""
    base = RunConfig.find("mini")

    def model(*names: str) -> ModelConfig | None:
        try:
            return changed(base, ["+".join(names)]).model
        except ConfigError:
            return None

    assert not [pair for pair in pairs if model(*pair) != model(*reversed(pair))]


@pytest.mark.parametrize(
    "names", [["xsa+kimi"], ["kimi+xsa"], ["xsa", "kimi"], ["xsa", "train.steps=9", "kimi"]], ids=str
)
def test_a_name_without_its_part_is_refused_with_the_reason(names: list[str]) -> None:
    words = (
        r"'xsa' cannot be combined with 'kimi': own_value is a key of softmax attention, but attention\.softmax\.kind"
    )
    with pytest.raises(ConfigError, match=words):
        overrides(names, RunConfig.find("mini").model)


@pytest.mark.parametrize("name", ["exoformer+kimi", "kimi+exoformer"])
def test_anchors_on_latent_attention_are_refused_as_such(name: str) -> None:
    with pytest.raises(ConfigError, match=r"anchors\.kind = 'exoformer' mixes keys and values per head"):
        changed(RunConfig.find("mini"), [name])
