"""The documentation's code runs as written, its pictures match the code, and its links work."""

import re
import shlex
import subprocess
import sys
from math import factorial
from pathlib import Path

import pytest
import torch

import residua
from residua.config.choices import TopologyChoice
from residua.config.run import RunConfig
from residua.model import taps
from residua.model.size import measure
from residua.model.topology import build_topology
from tests.docs.commands import load_module, parse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)


def test_dir_of_the_package_lists_every_documented_name():
    pages = [str(page.relative_to(DOCS)) for page in DOCS.glob("*.md")]
    code = "\n".join(block for page in pages for block in python_blocks(page))
    parts = {path.stem for path in Path(residua.__file__).parent.iterdir()}
    named = {name for name in re.findall(r"\bresidua\.(\w+)", code) if name not in parts}
    assert {"ModelConfig", "build", "load"} <= named
    script = "import residua; print(*dir(residua))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert named <= set(shown.split())


def test_readme_python_runs_as_pasted():
    (code,) = python_blocks("../README.md")
    scope: dict = {}
    exec(code, scope)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in scope["model"].parameters())


def test_bench_page_code_runs_as_pasted():
    (code,) = python_blocks("bench.md")
    scope: dict = {}
    exec(code, scope)
    torch.testing.assert_close(scope["fast"], scope["exact"])


def test_every_fused_operator_is_listed():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    fused = [name for name in residua.ops.__all__ if getattr(getattr(residua.ops, name), "fused", None) is not None]
    variants = {"multi_gate_chain", "multi_gate_inverted"}
    assert not [name for name in fused if f"`{name}`" not in text and name not in variants]


L, C, N = 6, 40, 4
K = 2 * L
DOCUMENTED = {
    "additive": ({}, 0),
    "clipped": ({}, 0),
    "layer_factor": ({}, L),
    "scaled": ({}, C * K),
    "scaled scalar": ({"gain": "scalar"}, K),
    "laurel": ({"rank": 3}, (2 * 3 * C + 2) * K),
    "lns": ({}, C * (K + 1)),
    "keel": ({}, C * (K - 1)),
    "deepnorm": ({}, C * K),
    "resi_dual": ({}, C * (K + 1)),
    "x0": ({}, 2 * L + 1),
    "x0 sublayer": ({"scalars": "sublayer"}, 3 * K + 1),
    "full_attnres": ({}, 2 * C * K),
    "block_attnres": ({"sublayers_per_block": 3}, 2 * C * K),
    "boundary_attnres": ({"sublayers_per_block": 3}, 2 * C * (K // 3 - 1)),
    "delta_attnres": ({}, 2 * C * (K - 1)),
    "multi_gate": ({"streams": N}, C * K + (C + N + 1) * (K - N + 1)),
    "multi_gate independent": ({"streams": N, "gate": "independent"}, C * K + (C + N) * (K - N + 1)),
    "highway": ({}, (C + 1) * K),
    "highway elementwise": ({"gate": "elementwise"}, (C * C + C) * K),
    "gated_residual": ({"streams": N, "rank": 5}, (K + 1) * (N * C + 2 * 5 * N * C) + K * N * N * C),
    "hyper": ({"streams": N, "weights": "static"}, N * (N + 2) * K),
    "hyper dynamic": ({"streams": N}, (N * (N + 2) + C * (N + 2) + 2) * K),
    "hyper identity": ({"streams": N, "mix": "identity"}, (2 * N + 2 * C + 2) * K),
    "hyper cyclic": ({"streams": N, "mix": "cyclic"}, (3 * N + 2 * C + 2) * K),
    "hyper_single_pass": ({"streams": N}, (N * (N + 2) + C * (N + 2) + 2) * K),
    "frac": ({"weights": "static"}, N * (2 * N + 1) * K),
    "frac dynamic": ({}, ((C // N + N) * (2 * N + 1) + 2) * K),
    "mhc": ({"streams": N}, (N * C * (N * N + 2 * N) + N * N + 2 * N + 3) * K),
    "mhc_lite": ({"streams": N}, (N * C * (factorial(N) + 2 * N) + factorial(N) + 2 * N + 3) * K),
    "dense": ({}, L * (L + 3) // 2),
    "mudd": (
        {},
        sum(4 * i * (C + 1) + 16 * i * i for i in range(2, L + 1)) + (L + 1) * (C + 1) + (L + 1) ** 2,
    ),
    "dca": ({}, 3 * C * L * (L + 3) // 2 + C * (L + 2)),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_topologies_have_the_documented_parameter_counts(name):
    keys, expected = DOCUMENTED[name]
    config = residua.ModelConfig(
        layers=L,
        width=C,
        attention={"kind": "softmax", "heads": 4},
        ffn={"kind": "relu2", "hidden": 64},
        topology={"kind": name.split()[0], **keys},
    )
    assert measure(config).depth == expected


def test_every_topology_has_a_section_and_a_row():
    page, costs = ((DOCS / name).read_text("utf-8") for name in ("topologies.md", "reference/topology-notes.md"))
    # plugins that another test loaded are not ours
    ours = [t for t in TopologyChoice.alternatives() if t.__module__.startswith("residua.")]
    kinds = [t.model_fields["kind"].default for t in ours]
    assert len(kinds) > 20
    assert [k for k in kinds if not re.search(rf"^\| `{k}`", costs, re.M)] == []
    assert [k for k in kinds if not re.search(rf"^## .*\b{k}\b", page, re.M)] == []


def test_recorded_taps_match_the_documentation():
    config = residua.ModelConfig.preset("tiny-exo").override(
        ["topology=multi_gate", "ffn={kind='moe', hidden=8, experts=4, top_k=2}"]
    )
    with taps.record() as seen, torch.no_grad():
        residua.build(config)(torch.zeros(1, 4, dtype=torch.long))
    page = (DOCS / "taps.md").read_text(encoding="utf-8")
    names = {re.sub(r"\.\d+\.", ".l." if n.startswith(("attention", "moe")) else ".k.", n) for n in seen}
    assert names and all(f"`{n}`" in page for n in names)


@pytest.mark.slow
def test_slurm_script_is_valid_bash_and_its_command_parses():
    (script,) = re.findall(r"```text\n(#!/bin/bash.*?)```", (DOCS / "reference/clusters.md").read_text("utf-8"), re.S)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    command = script.replace("\\\n", " ").partition("--no-python residua ")[2].replace("$resume", "--resume")
    verb, parameters = parse(shlex.split(command))
    assert verb == "train" and parameters["resume"]
    RunConfig.find(parameters["source"]).override(parameters["changes"])


def _listed() -> set[str]:
    """The paths that the page's indented list names."""
    (block,) = re.findall(r"```text\nresidua/\n(.*?)```", (DOCS / "architecture.md").read_text("utf-8"), re.S)
    found, parents = set(), {}
    for line in block.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        parents[depth] = name
        found.add("".join(parents[d] for d in sorted(parents) if d < depth) + name)
        parents = {d: n for d, n in parents.items() if d <= depth}
    return found


def test_documented_layout_matches_the_tree():
    here = ROOT / "residua"
    operators = {p.parent for p in here.glob("ops/[a-z]*/__init__.py")}
    folders = {p.parent for p in here.glob("**/__init__.py")} - operators - {here}
    modules = {p for p in here.glob("*.py") if not p.stem.startswith("__")}
    tree = {f"{p.relative_to(here)}/" for p in folders} | {p.name for p in modules}
    assert _listed() == tree


@pytest.mark.slow
def test_architecture_picture_matches_the_code():
    drawing = load_module("tools/architecture.py")
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.draw(), "run `make map` and look at the picture"


def test_every_documented_package_path_exists():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = {
        page.name: re.findall(r"\b((?:residua|tests)/[a-z_/.]*[a-z])(?![\w/])", page.read_text("utf-8"))
        for page in pages
    }
    assert sum(map(len, found.values())) > 20
    assert not [(page, path) for page, paths in found.items() for path in paths if not (ROOT / path).exists()]


@pytest.fixture(scope="module")
def drawing():
    return load_module("tools/topologies.py")


@pytest.fixture(scope="module")
def anchors():
    return load_module("tools/anchors.py")


@pytest.mark.parametrize(("tool", "page", "name"), [("drawing", "topologies", "topology"), ("anchors",) * 3])
def test_pictures_match_the_code_and_stand_on_their_page(request, tool, page, name):
    made = request.getfixturevalue(tool).made()
    assert [p.name for p, content in made.items() if p.read_text(encoding="utf-8") != content] == [], "run `make map`"
    assert {p.name for p in (DOCS / "img").glob(f"{name}-*.svg")} == {p.name for p in made}
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert set(re.findall(rf"\(img/({name}-\w+\.svg)\)", text)) == {p.name for p in made}


def test_every_picture_is_shown_on_a_page():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\bimg/([\w-]+\.\w+)\)", page.read_text("utf-8"))}
    assert {path.name for path in (DOCS / "img").iterdir()} == shown


def test_kinds_without_a_picture_look_like_the_one_shown(drawing):
    for kind, shown in drawing.DRAWN_AS.items():
        assert drawing.draw(kind) == drawing.draw(shown).replace(f" in {shown}<", f" in {kind}<")


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"kind": "resformer"}, {"v": {(1, "v"): "learned"}}),
        ({"kind": "gated_value"}, {"v": {(1, "v"): "gate"}}),
        ({"kind": "value_embeddings"}, {"v": {(0, "t"): "gate"}}),
        ({"kind": "exoformer", "pathways": ["q", "g"]}, {s: {(0, s): "learned"} for s in "qg"}),
        ({"kind": "lime"}, {s: {(n, s): "learned" for n in (1, 2, 3)} for s in "kv"}),
        ({"kind": "cla", "group": 3}, {}),
        ({"kind": "kv_source", "shared": "v"}, {"v": {(1, "v"): "taken"}}),
        (
            {"kind": "depth_attention"},
            {"v": {(n, s): how for n in (1, 2, 3) for s, how in (("k", "compared"), ("v", "attended"))}},
        ),
    ],
    ids=str,
)
def test_the_tracer_finds_what_the_last_of_four_layers_reads(anchors, settings, last):
    layer = anchors.trace(settings)[-1]
    assert {pathway: sources for pathway, sources in layer.reads.items() if sources} == last
    assert set("qkvg") - set(layer.own) == {s for s, sources in last.items() if "taken" in sources.values()}


def _reads(drawing, kind: str, **options) -> list[list[int]]:
    choice = {t.model_fields["kind"].default: t for t in TopologyChoice.alternatives()}[kind]
    topology = build_topology(choice(**options), drawing.SUBLAYERS, drawing.WIDTH).double()
    return [sorted(junction.reads) for junction in drawing.trace(topology)]


def test_the_tracer_finds_the_sources_of_each_sublayer(drawing):
    assert _reads(drawing, "additive") == [[0]] * 7
    assert _reads(drawing, "full_attnres") == [list(range(k + 1)) for k in range(7)]
    assert len(_reads(drawing, "full_attnres", window=2)[-1]) == 3  # the embedding and two outputs
    assert _reads(drawing, "block_attnres", sublayers_per_block=3) == [[0]] + [[0, 1]] * 3 + [[0, 1, 2]] * 3
    assert _reads(drawing, "multi_gate", streams=3) == [[0], [0, 1]] + [[0, 1, 2]] * 5


def test_every_relative_link_points_to_a_repository_file() -> None:
    relative = [target for _, target in LINK.findall(README) if not target.startswith("https://")]
    assert len(relative) > 20
    assert [target for target in relative if not (ROOT / target.partition("#")[0]).exists()] == []


def test_pypi_links_are_absolute_and_point_to_the_same_file() -> None:
    text = load_module("setup.py").absolute(README, "https://example.org/us/residua", "v1")
    pairs = list(zip(LINK.findall(README), LINK.findall(text), strict=True))
    for (mark, before), (_, after) in pairs:
        assert after.startswith("https://")
        if not before.startswith("https://"):
            assert after == f"https://example.org/us/residua/{'raw' if mark else 'blob'}/v1/{before}"
    assert any(mark for (mark, _), _ in pairs)


def test_a_build_knows_its_repository_only_on_github(monkeypatch) -> None:
    setup = load_module("setup.py")
    for name, value in (("SERVER_URL", "https://example.org"), ("REPOSITORY", "us/residua"), ("SHA", "abc")):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    assert setup.repository() == ("https://example.org/us/residua", "abc")
    monkeypatch.delenv("GITHUB_REPOSITORY")
    assert setup.repository() is None


def test_every_quoted_interval_is_in_a_study_table() -> None:
    """A study that is extended must not leave old numbers in the sentences about it."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "results").glob("*.md")]
    made = "".join(block for page in pages for block in re.findall(r"<!-- study .*?<!-- end -->", page, re.S))
    words = README + re.sub(r"<!-- study .*?<!-- end -->", "", (ROOT / "docs" / "RESULTS.md").read_text(), flags=re.S)
    told = re.findall(r"(\d\.\d\d)(?:×| times)(?:\s[\w-]+)*\s+(\[[^]]*\d\])", words)
    assert len(told) > 2
    wanted = [f" {gain}× {' '.join(ends.split())}" for gain, ends in told]
    assert [words for words in wanted if f"{words} |" not in made and f"{words}." not in made] == []


@pytest.mark.slow
def test_answer_picture_matches_the_measured_study() -> None:
    answer = load_module("tools/answer.py")
    found = answer.measured()
    assert {row.size for row in found} == {"124 M", "51 M"}
    assert found == sorted(found, key=lambda row: row.change)
    assert answer.PICTURE.read_text(encoding="utf-8") == answer.draw(found), "run `make results`"
    assert "docs/img/answer.svg" in README


def test_answer_picture_title_follows_from_the_numbers() -> None:
    answer = load_module("tools/answer.py")
    paying = [
        answer.Row(name, -0.2, -0.3, -0.1, 1.2, 1.1, 1.3, 1.1, gain, True)
        for name, gain in {"A": 1.1, "B": 1.2, "C": 1.05}.items()
    ]
    unsure = answer.Row("D", -0.1, -0.3, 0.1, 1.3, 0.8, 1.6, 1.1, 1.18, False)
    lower = answer.Row("E", -0.2, -0.3, -0.1, 1.2, 1.1, 1.3, 1.5, 0.8, False)
    assert answer._answer([*paying, unsure]) == "Faster per second: B 1.20×, A 1.10×, and 1 more."
    smaller = paying[1]._replace(gain=1.15, size="51 M")
    assert answer._answer([smaller, *paying]) == "Faster per second: B 1.20×, A 1.10×, and 1 more."
    assert answer._answer([paying[0], unsure]) == "Faster per second: A 1.10×."
    assert answer._answer([lower, unsure]) == "Lower loss per step: E. Faster per second: none in this study."
    assert answer._answer([unsure]) == "No lower loss was shown. Faster per second: none in this study."


def test_an_unready_release_lists_its_faults(tmp_path) -> None:
    release = load_module("tools/release.py")
    (tmp_path / "residua").mkdir()
    (tmp_path / "residua" / "version.py").write_text('__version__ = "0.3.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## 0.2.0 (unreleased)\n\n{'word ' * 1_501}\n\n## 0.1.0\n")
    assert [words[:32] for words in release.faults(tmp_path)] == [
        "CHANGELOG.md begins with 0.2.0, ", "CHANGELOG.md gives 0.2.0 no date", "The changelog of 0.2.0 has 1,501",
    ]  # fmt: skip
    (tmp_path / "CHANGELOG.md").write_text("## 0.3.0 (2026-12-01)\n\nWords.\n")
    assert release.faults(tmp_path) == []
    assert release.site_command("0.3.1").startswith("mike deploy --push --update-aliases 0.3 latest &&")
