"""Configurations: TOML in and out, overrides, and one sentence for every mistake."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError, apply_overrides, merge
from residua.reading import ReadError
from residua.study import StudyConfig
from tests.model.combinations import ROWS, TABLES, config_of, name_of
from tests.model.small import small

GATE = {"kind": "softmax", "heads": 2, "gate": "elementwise"}
LINEAR = {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2}

KINDS: dict[str, dict[str, Any]] = {
    f"{section} {name}": {section: table} | ({"attention": GATE} if section == "anchors" else {})
    for section, tables in TABLES.items()
    for name, table in tables.items()
}
KINDS |= {
    "anchors dynamic with its own width": {
        "anchors": {"kind": "nuresformer", "mixing": {"kind": "dynamic", "hidden": 3}, "norm": "none"},
        "attention": GATE,
    },
    "topology printed bias": {
        "topology": {"kind": "multi_gate", "streams": 2, "gate": "independent", "bias_init": "printed"}
    },
    "head zero": {"head": {"kind": "untied", "init": "zero"}, "init": {"std": 0.1, "output": "normal"}},
    "attention odd theta": {"attention": {"kind": "softmax", "heads": 2, "rope_theta": 123456.789}},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_survives_a_toml_round_trip(name: str, tmp_path: Path) -> None:
    config = small(**KINDS[name])
    path = tmp_path / "model.toml"
    path.write_text(config.to_toml())
    again = ModelConfig.from_toml(path)
    assert again == config and again.to_toml() == config.to_toml()
    assert ModelConfig.from_dict(config.model_dump()) == config


@pytest.mark.parametrize("row", ROWS[::8], ids=name_of)
def test_every_combination_survives_a_nested_toml_round_trip(row: dict[str, str], tmp_path: Path) -> None:
    config = config_of(row)
    nested = re.sub(r"^\[", "[model.", config.to_toml(), flags=re.MULTILINE)
    path = tmp_path / "run.toml"
    path.write_text("[model]\n" + nested)
    assert ModelConfig.from_toml(path) == config


def test_a_configuration_cannot_be_changed_in_place() -> None:
    config = small()
    with pytest.raises(ValidationError):
        config.layers = 4
    assert hash(config) == hash(small())


def test_overrides_change_only_the_named_keys() -> None:
    config = small()
    changed = config.override(["layers=5", "attention.gate=headwise", "norm.eps=1e-5", "init.output='zero'"])
    expected = small(
        layers=5,
        attention={"kind": "softmax", "heads": 2, "gate": "headwise"},
        norm={"kind": "rmsnorm", "eps": 1e-5},
        init={"std": 0.2, "output": "zero"},
    )
    assert changed == expected
    assert config == small()


def test_a_new_kind_drops_the_old_kinds_keys() -> None:
    config = small(topology={"kind": "multi_gate", "streams": 3, "gate": "independent"})
    assert config.override(["topology.kind=mhc"]).topology.model_dump() == {
        "kind": "mhc",
        "streams": 4,
        "iterations": 20,
    }
    assert config.override(["topology=mhc"]) == config.override(["topology.kind=mhc"])
    assert config.override(["topology.kind=multi_gate"]) == config


def test_overrides_accept_tables_and_lists() -> None:
    config = small().override(["topology={kind='block_attnres', sublayers_per_block=2}"])
    assert config.topology.model_dump()["sublayers_per_block"] == 2
    config = small().override(["anchors={kind='exoformer', pathways=['q', 'v']}"])
    assert config.anchors.pathways == ("q", "v")
    assert config.override(["anchors.pathways=['k']"]).anchors.pathways == ("k",)


def test_overrides_apply_in_order_and_are_checked_together() -> None:
    config = small().override(["topology.kind=block_attnres", "topology.sublayers_per_block=2", "layers=1"])
    assert (config.layers, config.topology.kind) == (1, "block_attnres")
    assert small().override(["layers=4", "layers=6"]).layers == 6


def test_merge_replaces_a_table_whose_kind_changes() -> None:
    base = {"a": {"kind": "x", "p": 1}, "b": {"q": 1, "r": 2}}
    assert merge(base, {"a": {"kind": "y"}, "b": {"q": 3}}) == {"a": {"kind": "y"}, "b": {"q": 3, "r": 2}}
    assert merge(base, {"a": {"p": 2}}) == {"a": {"kind": "x", "p": 2}, "b": {"q": 1, "r": 2}}
    assert base == {"a": {"kind": "x", "p": 1}, "b": {"q": 1, "r": 2}}


@pytest.mark.parametrize("change", ["layers", "=3", "a..b=3", ".layers=3"])
def test_a_malformed_override_is_refused(change: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{change!r} is not of the form section.key=value")):
        apply_overrides({}, [change])


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["layrs=3"], ["layrs = 3", "did you mean 'layers'?"]),
    "unknown key of a table": (["ffn.hiden=3"], ["ffn.hiden = 3", "did you mean 'hidden'?"]),
    "unknown key of a nested table": (
        ["anchors={kind='exoformer', pathways=['q'], mixing={kind='dynamic', hiden=3}}"],
        ["anchors.mixing.hiden = 3", "did you mean 'hidden'?"],
    ),
    "key of another kind": (["topology.iterations=3"], ["topology.iterations = 3", "not a known key"]),
    "unknown kind": (["topology.kind=full_atnres"], ["topology.kind = 'full_atnres'", "did you mean 'full_attnres'?"]),
    "unknown kind far from any": (["norm.kind=zzz"], ["norm.kind = 'zzz'", "'preaffine', 'gatednorm'"]),
    "unknown nested kind": (
        ["anchors={kind='exoformer', mixing={kind='dynamc'}}"],
        ["anchors.mixing.kind = 'dynamc'", "did you mean 'dynamic'?"],
    ),
    "no kind": (
        ["anchors={kind='exoformer', mixing={hidden=3}}"],
        ["anchors.mixing has no kind", "'static', 'dynamic'"],
    ),
    "wrong word": (["attention.gate=elementwse"], ["attention.gate = 'elementwse'", "did you mean 'elementwise'?"]),
    "number for a word": (["attention.sink=3"], ["attention.sink = 3", "'none', 'learned'"]),
    "wrong word in a list": (
        ["anchors={kind='exoformer', pathways=['q', 'x']}"],
        ["anchors.pathways", "'x'", "'q', 'k'"],
    ),
    "pathway twice": (
        ["anchors={kind='exoformer', pathways=['q', 'q']}"],
        ["anchors.pathways = ['q', 'q']", "without repetition"],
    ),
    "no pathway": (["anchors={kind='exoformer', pathways=[]}"], ["anchors.pathways = []"]),
    "too small": (["layers=0"], ["layers = 0", "1 or more"]),
    "zero scale": (["topology={kind='full_attnres', scale=0}"], ["topology.scale = 0", "more than 0"]),
    "no window": (["topology={kind='full_attnres', window=0}"], ["topology.window = 0"]),
    "fraction": (["layers=2.5"], ["layers = 2.5", "whole number"]),
    "word for a number": (["width=wide"], ["width = 'wide'", "whole number"]),
    "truth for a number": (["layers=true"], ["layers = True"]),
    "truth for a fraction": (["norm.eps=true"], ["norm.eps = True", "expected a number"]),
    "truth in a list": (["anchors={kind='resformer', start=[true, 1]}"], ["anchors.start.0 = True"]),
    "beyond float32": (["norm={kind='dyt', alpha=1e39}"], ["norm.alpha = 1e+39", "float32"]),
    "turns without end": (["order={kind='loop', turns=2000000000}"], ["order.turns = 2000000000", "10,000"]),
    "not a number": (["norm.eps=nan"], ["norm.eps = nan", "finite"]),
    "infinite": (["init.std=inf"], ["init.std = inf", "finite"]),
    "number for a table": (["topology=3"], ["topology = 3", "table"]),
    "missing value": (["topology.kind=block_attnres"], ["topology.sublayers_per_block", "missing"]),
    "heads that do not divide": (["attention.heads=3"], ["attention.heads = 3", "width = 16", "1, 2, 4, 8, 16"]),
    "key-value heads that do not divide": (["attention.kv_heads=3"], ["attention.kv_heads = 3", "attention.heads = 2"]),
    "odd heads": (["attention.head_dim=5"], ["attention.head_dim = 5", "even"]),
    "block longer than the model": (
        ["topology={kind='block_attnres', sublayers_per_block=7}"],
        ["topology.sublayers_per_block = 7", "layers = 3", "at most 6"],
    ),
    "permutations of 8 streams": (
        ["topology={kind='mhc_lite', streams=8}"],
        ["topology.kind = 'mhc_lite'", "topology.streams = 8", "at most 4", "'mhc'"],
    ),
    "gates without a start": (
        ["layers=5", "topology={kind='multi_gate', streams=8}"],
        ["topology.streams = 8", "3 gated sublayers", "layers", "at least 4"],
    ),
    "printed gates without a start": (
        ["layers=5", "topology={kind='multi_gate', streams=8, gate='independent', bias_init='printed'}"],
        ["topology.streams = 8", "no solution"],
    ),
    "streams that never fill": (
        ["topology={kind='multi_gate', streams=7}"],
        ["topology.streams = 7", "layers = 3", "at most 6"],
    ),
    "anchors on linear attention": (
        ["attention={kind='gated_deltanet', key_heads=1, value_heads=2}", "anchors=resformer"],
        ["anchors.kind = 'resformer'", "attention.kind = 'gated_deltanet'"],
    ),
    "a source of keys in linear attention": (
        ["attention={kind='gated_deltanet', key_heads=1, value_heads=2}", "anchors=kv_source"],
        ["anchors.kind = 'kv_source'", "attention.kind = 'gated_deltanet'"],
    ),
    "a gate to mix where there is none": (
        ["anchors=exoformer"],
        ["anchors.pathways", "'g'", "attention.gate = 'none'", "attention.gate = 'elementwise'"],
    ),
    "a gate to mix where it is headwise": (
        ["anchors=nuresformer", "attention.gate=headwise"],
        ["attention.gate = 'headwise'", "attention.gate = 'elementwise'"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_value_is_named_in_one_sentence(mistake: str) -> None:
    changes, words = MISTAKES[mistake]
    with pytest.raises(ConfigError) as refusal:
        small().override(changes)
    sentence = str(refusal.value)
    for word in words:
        assert word in sentence
    assert "\n" not in sentence and "pydantic" not in sentence
    assert sentence.endswith((".", "?"))
    assert len(re.findall(r"[.?](?:\s|$)", sentence)) == 1


def test_independent_gates_allow_more_streams_than_layers() -> None:
    small(layers=5, topology={"kind": "multi_gate", "streams": 8, "gate": "independent"})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, "layers is missing"),
        ({"layers": 2, "width": 16}, "attention is missing"),
        ({"layers": 2, "width": 16, "attention": {"heads": 2}}, "attention has no kind"),
        ({"layers": 2, "width": 16, "attention": LINEAR | {"key_heads": 3}}, "attention.key_heads = 3"),
    ],
)
def test_missing_keys_are_named(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        ModelConfig.from_dict(tables)


def test_an_unreadable_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    broken, latin = tmp_path / "broken.toml", tmp_path / "latin.toml"
    broken.write_text("layers = = 3")
    latin.write_bytes(b"layers = '\xff'")
    for path, words in (
        (tmp_path / "nowhere.toml", "does not exist"),
        (tmp_path, "is a folder, not a file"),
        (broken, "is not valid TOML"),
        (latin, "line 1 is not UTF-8 text"),
    ):
        with pytest.raises(ReadError, match=words) as refusal:
            ModelConfig.from_toml(path)
        assert str(path) in str(refusal.value)


@pytest.mark.parametrize("kind", [ModelConfig, RunConfig, StudyConfig])
def test_toml_text_given_as_a_path_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected a path, got the text of a TOML file: write it to a f"):
        kind.from_toml(RunConfig.find("tiny").to_toml())
