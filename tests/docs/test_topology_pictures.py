"""The pictures of how information flows are those that the topologies give."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("topologies", ROOT / "tools" / "topologies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_pictures_are_what_the_code_draws(drawing):
    made = drawing.made()
    assert [p.name for p, content in made.items() if p.read_text(encoding="utf-8") != content] == [], "run `make map`"
    assert {p.name for p in (ROOT / "docs" / "img").glob("topology-*.svg")} == {p.name for p in made}


def test_every_section_of_the_page_shows_its_picture(drawing):
    page = (ROOT / "docs" / "topologies.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\(img/(topology-\w+\.svg)\)", page))
    alike = {"topology-mhc.svg", "topology-mhc_lite.svg"}  # one section with hyper, and the same flow
    assert shown | alike == {p.name for p in drawing.made()}


def _reads(drawing, kind: str, **options) -> list[list[int]]:
    from residua.config import choices
    from residua.model.topology import build_topology

    choice = {t.model_fields["kind"].default: t for t in choices.TopologyChoice.alternatives()}[kind]
    topology = build_topology(choice(**options), drawing.SUBLAYERS, drawing.WIDTH).double()
    return [sorted(junction.reads) for junction in drawing.trace(topology)]


def test_the_tracer_finds_what_each_sublayer_reads(drawing):
    assert _reads(drawing, "additive") == [[0]] * 7
    assert _reads(drawing, "full_attnres") == [list(range(k + 1)) for k in range(7)]
    assert len(_reads(drawing, "full_attnres", window=2)[-1]) == 3  # the embedding and two outputs
    assert _reads(drawing, "block_attnres", sublayers_per_block=3) == [[0]] + [[0, 1]] * 3 + [[0, 1, 2]] * 3
    assert _reads(drawing, "multi_gate", streams=3) == [[0], [0, 1]] + [[0, 1, 2]] * 5
