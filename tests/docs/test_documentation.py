"""What the documentation says is run as written."""

import re
import shlex
import subprocess
import sys
from math import factorial
from pathlib import Path

import pytest
import torch

import residua
from residua.config.run import RunConfig
from residua.model.decoder import build
from residua.model.size import measure

DOCS = Path(__file__).parents[2] / "docs"


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)


def test_dir_of_the_package_shows_what_the_pages_name():
    pages = [str(page.relative_to(DOCS)) for page in DOCS.glob("*.md")]
    code = "\n".join(block for page in pages for block in python_blocks(page))
    parts = {path.stem for path in Path(residua.__file__).parent.iterdir()}
    named = {name for name in re.findall(r"\bresidua\.(\w+)", code) if name not in parts}
    assert {"ModelConfig", "build", "load"} <= named
    script = "import residua; print(*dir(residua))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert named <= set(shown.split())


@pytest.mark.slow
def test_the_readme_builds_its_model_and_takes_a_loss(monkeypatch):
    """Of its 124 million parameters, those of four layers and a small vocabulary are filled."""
    (code,) = python_blocks("../README.md")
    small = ["layers=4", "vocab_size=1024"]
    monkeypatch.setattr(residua, "build", lambda config: build(config.override(small)))
    tokens = torch.randint(0, 1024, (1, 9))
    scope: dict = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    with torch.no_grad():
        exec(code, scope)
    assert scope["loss"].isfinite()
    assert measure(scope["config"]).parameters > 100e6


def test_the_page_on_kernels_works_as_written_and_names_every_operator_with_one():
    (code,) = python_blocks("kernels.md")
    scope: dict = {}
    exec(code, scope)
    torch.testing.assert_close(scope["fast"], scope["exact"])
    text = (DOCS / "kernels.md").read_text(encoding="utf-8")
    fused = [name for name in residua.ops.__all__ if getattr(getattr(residua.ops, name), "fused", None) is not None]
    variants = {"multi_gate_chain", "multi_gate_inverted"}
    assert not [name for name in fused if f"`{name}`" not in text and name not in variants]


L, C, N = 6, 40, 4
K = 2 * L
DOCUMENTED = {
    "additive": ({}, 0),
    "clipped": ({}, 0),
    "full_attnres": ({}, 2 * C * K),
    "block_attnres": ({"sublayers_per_block": 3}, 2 * C * K),
    "boundary_attnres": ({"sublayers_per_block": 3}, 2 * C * (K // 3 - 1)),
    "multi_gate": ({"streams": N}, C * K + (C + N + 1) * (K - N + 1)),
    "multi_gate independent": ({"streams": N, "gate": "independent"}, C * K + (C + N) * (K - N + 1)),
    "highway": ({}, (C + 1) * K),
    "highway elementwise": ({"gate": "elementwise"}, (C * C + C) * K),
    "hyper": ({"streams": N, "weights": "static"}, N * (N + 2) * K),
    "hyper dynamic": ({"streams": N}, (N * (N + 2) + C * (N + 2) + 2) * K),
    "mhc": ({"streams": N}, (N * C * (N * N + 2 * N) + N * N + 2 * N + 3) * K),
    "mhc_lite": ({"streams": N}, (N * C * (factorial(N) + 2 * N) + factorial(N) + 2 * N + 3) * K),
    "dense": ({}, L * (L + 3) // 2),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_topologies_have_the_parameters_their_table_says(name):
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
    from residua.config.choices import TopologyChoice

    page = (DOCS / "topologies.md").read_text(encoding="utf-8")
    kinds = [t.model_fields["kind"].default for t in TopologyChoice.alternatives()]
    assert [k for k in kinds if not re.search(rf"^\| `{k}`", page, re.M)] == []
    assert [k for k in kinds if not re.search(rf"^## .*\b{k}\b", page, re.M)] == []


def test_recorded_taps_are_the_documented_ones():
    from residua.model import taps

    config = residua.ModelConfig.preset("tiny-exo").override(
        ["topology=multi_gate", "ffn={kind='moe', hidden=8, experts=4, top_k=2}"]
    )
    with taps.record() as seen, torch.no_grad():
        residua.build(config)(torch.zeros(1, 4, dtype=torch.long))
    page = (DOCS / "taps.md").read_text(encoding="utf-8")
    names = {re.sub(r"\.\d+\.", ".l." if n.startswith(("attention", "moe")) else ".k.", n) for n in seen}
    assert names and all(f"`{n}`" in page for n in names)


@pytest.mark.slow
def test_the_script_for_slurm_is_bash_and_its_command_is_understood():
    from tests.docs.commands import parse

    (script,) = re.findall(r"```text\n(#!/bin/bash.*?)```", (DOCS / "nodes.md").read_text(encoding="utf-8"), re.S)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    command = script.replace("\\\n", " ").partition("--no-python residua ")[2].replace("$resume", "--resume")
    verb, parameters = parse(shlex.split(command))
    assert verb == "train" and parameters["resume"]
    RunConfig.find(parameters["source"]).override(parameters["changes"])
