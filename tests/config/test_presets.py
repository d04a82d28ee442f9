"""The models that come with Residua: they build, and they are as large as the papers say."""

import pytest

from residua.config import presets
from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.model.size import measure
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow

EXOFORMER_VOCABULARY = 57_601


def parameters(name: str, vocabulary: int | None = None) -> float:
    config = ModelConfig.preset(name)
    return measure(config.override([f"vocab_size={vocabulary}"]) if vocabulary else config).parameters


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_a_valid_run_with_a_summary(name):
    assert len(presets.load(name)["summary"]) < 100
    RunConfig.find(name)


def test_grid_preset_combines_size_variant_and_exception():
    own, parent = presets.load("mgr-m-block4"), presets.load("mgr-m-prenorm")
    assert own["model"].pop("topology") == {"kind": "block_attnres", "sublayers_per_block": 12}
    assert own.pop("summary") == "MGR paper, M (0.35B): Block Attention Residuals, 4 blocks"
    assert own == {key: table for key, table in parent.items() if key != "summary"}
    own["train"]["optimizer"]["lr"] = 0.0  # a loaded preset is the caller's own
    assert presets.load("mgr-m-block4")["train"]["optimizer"]["lr"] == 0.006


@pytest.mark.parametrize(("size", "billions"), [("s", 0.12), ("m", 0.35), ("l", 0.77)])
def test_mgr_presets_have_the_papers_sizes(size, billions):
    names = [n for n in presets.names() if n.startswith(f"mgr-{size}-")]
    assert len(names) == 9
    baseline = parameters(f"mgr-{size}-prenorm")
    assert round(baseline / 1e9, 2) == billions
    for name in names:
        slack = 0.02 if "mhc" in name else 0.002  # mHC-lite's maps are up to 2 % of the model, and the paper's too
        assert baseline <= parameters(name) <= (1 + slack) * baseline


def test_exoformer_presets_have_the_papers_sizes_and_vocabulary():
    millions = {"base": 454, "resformer": 454, "gated": 453, "naive": 453}
    rows = [n for n in presets.names() if n.startswith("exoformer-")]
    assert len(rows) == 18
    for name in rows:
        row = name.removeprefix("exoformer-")
        expected = millions.get(row, 453 if row.startswith("nures") else 457)
        assert parameters(name, EXOFORMER_VOCABULARY) / 1e6 == pytest.approx(expected, abs=0.6)


def test_the_outlier_presets_cover_every_row_of_the_study():
    rows = [n for n in presets.names() if n.startswith("outlier-2b-")]
    assert len(rows) == 21  # of 22: rows 6 and 7 of the table are one model at two learning rates
    assert parameters("outlier-2b-full", 151_936) / 1e9 == pytest.approx(1.66, abs=0.01)
    gate = parameters("outlier-2b-ga-gatednorm") - parameters("outlier-2b-ga")
    assert gate == (28 * 2 + 1) * 2 * 2048 * 16


def test_the_outlier_mixtures_have_the_rows_of_table_2():
    rows = [n for n in presets.names() if n.startswith(("outlier-7b", "outlier-24b"))]
    assert len(rows) == 6
    for base in ("outlier-7b-a2b", "outlier-24b-a3b"):
        layers = ModelConfig.preset(base).layers
        listed = {row: presets.sizes()[f"{base}{row}"].parameters for row in ("", "-preaffine", "-gatednorm")}
        assert listed["-preaffine"] - listed[""] == (2 * layers + 1) * 2048
        assert listed["-gatednorm"] - listed[""] == (2 * layers + 1) * 2 * 2048 * 16


def test_outlier_mixtures_follow_table_5_not_its_headings():
    """The table's shapes give these counts; the headings say 7.4B-A1.7B and 24.6B-A2.7B (docs/reference/hybrids.md)."""
    for name, total, active in (("outlier-7b-a2b", 16.01, 1.89), ("outlier-24b-a3b", 20.81, 1.77)):
        size = measure(ModelConfig.preset(name))
        assert size.parameters / 1e9 == pytest.approx(total, abs=0.01)
        assert size.active / 1e9 == pytest.approx(active, abs=0.01)
    experts = 48 * 128 * 3 * 2048 * 384  # layers × experts × matrices × width × hidden: twice 7.4B by themselves
    assert experts / 1e9 == pytest.approx(14.5, abs=0.1)


def test_kimi_linear_has_the_published_size():
    """48 B and 3 B active: the embedding and the head, 0.38 B each, are counted with neither or with one of them."""
    size = measure(ModelConfig.preset("kimi-linear-48b-a3b"))
    assert (size.parameters - size.embedding - size.head) / 1e9 == pytest.approx(48.37, abs=0.01)
    assert size.active / 1e9 == pytest.approx(3.11, abs=0.01)
    block = measure(ModelConfig.preset("kimi-linear-48b-a3b-block"))
    assert block.parameters - size.parameters == block.depth == 54 * 2 * 2304  # a query and a gain for every read
    mini = measure(ModelConfig.preset("kimi-linear-mini"))
    assert mini.active == pytest.approx(measure(ModelConfig.preset("mini")).active, rel=0.01)


@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_a_mixture_activates_as_much_as_its_dense_twin(name):
    dense, sparse = measure(ModelConfig.preset(name)), measure(ModelConfig.preset(f"{name}-moe"))
    assert dense.active <= sparse.active <= 1.005 * dense.active  # the router is all that is added
    assert sparse.parameters > 1.5 * dense.parameters


def test_part_sizes_add_up_to_the_total():
    for name in ("tiny-exo", "exoformer-e-dynamic", "mgr-s-mhc-lite", "tiny-hybrid-moe", "outlier-2b-linear"):
        s = measure(ModelConfig.preset(name))
        assert s.embedding + s.head + s.attention + s.ffn + s.norms + s.depth + s.anchors == s.parameters


def test_training_flops_follow_the_stated_formula():
    size = measure(ModelConfig.preset("mgr-s-prenorm"))
    assert size.flops_per_token == 6 * size.parameters + 6 * 12 * 768 * 1024


# one of each kind of model, and a mixture of experts
MEASURED = ("tiny-full", "tiny-hybrid-moe", "exoformer-e-dynamic", "mgr-s-mhc-lite", "outlier-2b-ga-gatednorm-glu")


@pytest.mark.parametrize("name", only_nightly(presets.names(), but=MEASURED))
def test_listed_sizes_match_counted_sizes(name):
    size, listed = measure(ModelConfig.preset(name)), presets.sizes()[name]
    counted = presets.Size(parameters=size.parameters, idle=size.idle, flops_per_token=size.flops_per_token)
    assert listed == counted, "run `make sizes`"


def test_every_preset_has_a_listed_size():
    assert [*presets.sizes()] == [*presets.names()], "run `make sizes`"


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'tiny-mgr'"):
        presets.load("tiny-mgrr")
