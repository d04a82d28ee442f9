"""From a study to its runs."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from residua.config.run import RunConfig, differences
from residua.config.settings import ConfigError, read_toml
from residua.data import Dataset
from residua.data.tokenizer import padded_vocabulary
from residua.model.decoder import build
from residua.model.size import measure
from residua.study import StudyConfig
from residua.study.config import match
from residua.study.plan import StudyPlan, base_run, make_plan, vary
from residua.study.run_study import preview
from residua.study.train_runs import check_folders, cost_sentences, refuse_strangers, same_sentences
from residua.train.low_precision import chosen_products
from tests.study.conftest import changed

pytestmark = pytest.mark.slow


def test_variants_of_a_seed_share_their_data_order(plan: StudyPlan, dataset: Dataset) -> None:
    assert len(plan.runs) == 8
    for run in plan.runs:
        assert run.config.data.seed == run.config.train.seed == run.seed
        assert run.config.data.path == str(dataset.path.resolve())
    assert len({run.folder for run in plan.runs}) == 8


def test_the_vocabulary_follows_the_text_unless_set(
    study: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path
) -> None:
    assert {padded_vocabulary(tokens) for tokens in (257, 383, 384)} == {384} and padded_vocabulary(50257) == 50304
    assert {run.config.model.vocab_size for run in plan.runs} == {padded_vocabulary(dataset.vocab_size)}
    chosen = study.model_copy(update={"set": (*study.set, "model.vocab_size=512")})
    assert make_plan(chosen, out, dataset).runs[0].config.model.vocab_size == 512


def test_sizes_multiply_the_runs_and_tokens_follow_parameters(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    scaling = {"sizes": ["tiny", "mini"], "tokens_per_parameter": 2.0}
    plan = make_plan(changed(study, set=["train.schedule.warmup=1"], scaling=scaling), out, dataset)
    assert len(plan.runs) == 16
    for (size, _), model in plan.models.items():
        parameters = plan.models[size, "prenorm"].parameters
        tokens = model.config.train.steps * model.config.tokens_per_step
        assert tokens == pytest.approx(2 * parameters, rel=0.01)


def test_batch_and_warmup_grow_with_the_budget(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    rule = {"tokens_per_parameter": 400, "parameters": "matrices", "warmup": 0.1, "batch": 0.5}
    plan = make_plan(changed(study, set=[], scaling={"sizes": ["tiny", "mini"], **rule}), out, dataset)
    small, large = (plan.models[size, "prenorm"].config for size in ("tiny", "mini"))
    tokens = [400 * measure(config.model).active for config in (small, large)]
    assert small.tokens_per_step == RunConfig.find("tiny").tokens_per_step
    assert large.tokens_per_step / small.tokens_per_step == pytest.approx((tokens[1] / tokens[0]) ** 0.5, rel=0.1)
    for config, wanted in zip((small, large), tokens, strict=True):
        assert config.train.steps * config.tokens_per_step == pytest.approx(wanted, rel=0.01)
        assert config.train.schedule.warmup == round(0.1 * config.train.steps)
    with pytest.raises(ConfigError, match=r"also set scaling\.tokens_per_parameter"):
        changed(study, scaling={"sizes": ["tiny", "mini"], "batch": 0.5})


@pytest.mark.parametrize("path", sorted(Path("docs/results/studies").glob("*.toml")), ids=lambda path: path.stem)
def test_every_committed_study_is_valid(path: Path) -> None:
    if "variants" in read_toml(path):
        study = StudyConfig.from_toml(path)
        for size in study.sizes:
            for name in study.variants:
                vary(study, base_run(study, size), name)
    else:
        RunConfig.from_toml(path)


@pytest.mark.parametrize("name", ["training", "mini", "s"])
def test_low_precision_studies_take_every_matrix(name: str) -> None:
    """Products need multiples of 16: another feed-forward width, as matching may choose, leaves matrices in bf16."""
    study = StudyConfig.from_toml(Path(f"docs/results/studies/low-precision-{name}.toml"))
    vocabulary = ["model.vocab_size=8192"] if name == "training" else []
    base = base_run(study, study.base).override(vocabulary)
    target = study.match.measured(measure(base.model))
    for variant in (variant for variant in study.variants if variant.endswith(("_fp8", "_nvfp4"))):
        config = vary(study, base, variant).override(["train.low_precision.spared=0"])
        with torch.device("meta"):
            model = build(match(variant, config.model, target, study.match)[0])
        assert len(chosen_products(model, config.train)) == 4 * config.model.layers, variant


def test_a_folder_with_another_configuration_is_refused(plan: StudyPlan, dataset: Dataset) -> None:
    folder, config = plan.runs[3].folder, plan.runs[3].config
    folder.mkdir(parents=True)
    for change, words in (
        ("train.steps=77", r"train.steps = 77, but this study needs 10"),
        ("data.path='/elsewhere'", r"data.path = '/elsewhere', but this study needs"),
    ):
        (folder / "config.toml").write_text(config.override([change]).to_toml())
        with pytest.raises(ConfigError, match=rf"{folder} has a run with {words}"):
            check_folders(plan.runs)
    (folder / "checkpoints" / "step-5").mkdir(parents=True)  # a text that was moved is known by its fingerprint
    (folder / "environment.json").write_text(json.dumps({"text": "0123456789abcdef", "sessions": []}))
    with pytest.raises(ConfigError, match=r"data\.path"):
        check_folders(plan.runs)
    (folder / "environment.json").write_text(json.dumps({"text": dataset.fingerprint, "sessions": []}))
    check_folders(plan.runs)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("odd", "model.topology.kind=dence", r"variant 'odd': .*topology.kind = 'dence'"),
        # whose router learns nothing
        ("switch", "model.ffn={kind='moe', hidden=64, experts=4, top_k=1}", r"variant 'switch': model\.ffn\.top_k = 1"),
    ],
)
def test_a_variant_that_cannot_be_trained_is_named(
    name: str, change: str, sentence: str, study: StudyConfig, dataset: Dataset, out: Path
) -> None:
    broken = study.model_copy(update={"variants": {**study.variants, name: (change,)}})
    with pytest.raises(ConfigError, match=sentence):
        make_plan(broken, out, dataset)


def test_a_study_folder_with_foreign_files_is_refused(out: Path) -> None:
    refuse_strangers(out)
    for name in ("runs", "configs", "logs"):
        (out / name).mkdir(parents=True)
    (out / ".lock").touch()
    (out / "mine.toml").touch()
    refuse_strangers(out)
    (out / "notes.md").touch()
    with pytest.raises(ConfigError, match=r"notes\.md"):
        refuse_strangers(out)
    (out / "study.toml").touch()
    refuse_strangers(out)
    for place in (out / "notes.md", out / "notes.md" / "inside"):
        with pytest.raises(ValueError, match=r"is a file.*: choose another --out"):
            refuse_strangers(place)


def with_ladder(study: StudyConfig, *budgets: float, **changes: object) -> StudyConfig:
    return changed(study, ladder=budgets, **changes)


def test_a_ladder_adds_baseline_runs_and_changes_no_others(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    plain, laddered = (make_plan(chosen, out, dataset) for chosen in (study, with_ladder(study, 2, 0.5, 1)))
    assert {(r.folder, r.config) for r in laddered.compared} == {(r.folder, r.config) for r in plain.runs}
    assert [(r.title, r.seed, r.config.train.steps) for r in laddered.ladder] == [
        ("prenorm-2x-seed0", 0, 20),
        ("prenorm-0.5x-seed0", 0, 5),
        ("prenorm-2x-seed1", 1, 20),
        ("prenorm-0.5x-seed1", 1, 5),
    ]
    for run in laddered.ladder:  # except for its steps, it is the baseline's run of that seed
        own = next(r for r in plain.runs if (r.variant, r.seed) == ("prenorm", run.seed))
        assert differences(own.config, run.config).keys() == {"train.steps"}


@pytest.mark.parametrize(
    ("budgets", "sentence"),
    [
        ((0.2, 1.0), r"ladder = 0\.2: train\.schedule\.warmup = 2 must be less than train\.steps = 2"),
        ((1.0, 1.01), r"ladder = 1 and prenorm-1\.01x-seed0 have the same number of steps"),
        ((1.0,), "adds no budget"),
        ((0.5, -1.0), "distinct positive multiples"),
        ((0.5, 0.5), "distinct positive multiples"),
    ],
)
def test_a_ladder_that_cannot_be_trained_is_refused(
    budgets: tuple[float, ...], sentence: str, study: StudyConfig, dataset: Dataset, out: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_plan(with_ladder(study, *budgets), out, dataset)


def test_ladder_of_all_trains_every_variant_at_each_budget(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    plan = make_plan(with_ladder(study, 0.5, 2, ladder_of="all"), out, dataset)
    assert len(plan.ladder) == 2 * len(plan.compared) == 2 * 4 * 2
    steps = [run.config.train.steps for run in plan.runs[:6]]
    assert steps == [20, 10, 5, 20, 10, 5]  # of each variant the longest first


def test_a_ladder_that_repeats_the_text_is_reported(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    plan = make_plan(with_ladder(study, 1, 2), out, dataset)
    # two seeds of 20 steps, less the 8 steps that each run of 10 shares with them, of 64 tokens
    assert cost_sentences(plan) == ["The ladder adds 1.54 k training tokens to the 5.12 k of the comparison (+30%)."]
    steps = plan.text_tokens // 64  # 64 tokens in a step
    longer = with_ladder(study, 1, 2, set=(*study.set, f"train.steps={steps}"))
    assert "reads the text 2.0 times" in cost_sentences(make_plan(longer, out, dataset))[1]


def test_a_plan_names_variants_that_match_the_baseline(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    variants = {"prenorm": ["prenorm"], "wide": ["prenorm", "model.ffn.hidden=96"], "mgr": ["mgr"]}
    wider = changed(study, variants=variants, data=str(dataset.path), set=(*study.set, "model.ffn.hidden=64"))
    told = "wide is the same model as prenorm after matching (FFN width 96 → 64)"
    log = Console(record=True, width=300, file=io.StringIO())
    preview(wider, out, log)
    said = [line for line in log.export_text().splitlines() if "the same model" in line]
    assert said == [f"• {told}: use --match none to keep its settings."]
    free = changed(wider, match={"kind": "none"})
    assert same_sentences(free, make_plan(free, out, dataset)) == []
