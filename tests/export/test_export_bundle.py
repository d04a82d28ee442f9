"""The code of an exported folder is the library's own source, of the parts that the model has."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from residua.config.choices import MultiGate
from residua.export import modules, plain
from residua.export.bundle import bundle
from residua.export.tables import tables_source
from residua.model.decoder import build
from tests.model.small import small

pytestmark = pytest.mark.slow

LINEAR = {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}
HYBRID = {"kind": "hybrid", "softmax_every": 2, "softmax": {"heads": 2, "gate": "headwise"}, "linear": LINEAR}
CONFIGS = {
    "additive": small(layers=1),
    "mgr": small(
        topology={"kind": "multi_gate", "streams": 2},
        anchors={"kind": "exoformer"},
        attention={"kind": "softmax", "heads": 2, "gate": "elementwise"},
        norm={"kind": "gatednorm"},
    ),
    "attnres": small(
        layers=2, topology={"kind": "block_attnres", "sublayers_per_block": 2}, attention=HYBRID, norm={"kind": "dyt"}
    ),
}


@pytest.fixture(scope="module")
def bundles() -> dict[str, dict[str, str]]:
    return {name: bundle(build(config), "1.0") for name, config in CONFIGS.items()}


def test_kernels_that_cannot_be_imported_are_not_exported(monkeypatch):
    own = modules.member

    def member(module: str, name: str) -> Any:
        if module.startswith("residua.ops") and name in ("anchor_gradients", "launch"):
            raise ImportError("as without Triton")
        return own(module, name)

    monkeypatch.setattr(modules, "member", member)
    for name, text in bundle(build(CONFIGS["mgr"]), "1.0").items():
        imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
        assert not [node.module for node in imported if node.module.split(".")[0] == "residua"], name


def test_folder_holds_only_the_models_topology_and_mixers(bundles):
    families = ("topology_", "linear_attention", "moe", "ops_delta_rule", "ops_depth_attention")
    held = {
        name: {file.removeprefix("residua_") for file in files if file.removeprefix("residua_").startswith(families)}
        for name, files in bundles.items()
    }
    assert {"topology_additive.py"} <= held["additive"] and {"topology_multigate.py"} <= held["mgr"]
    assert not held["additive"] & {"topology_multigate.py", "topology_attnres.py", "linear_attention.py", "moe.py"}
    assert not held["mgr"] & {"topology_additive.py", "topology_attnres.py", "linear_attention.py", "moe.py"}
    assert {"topology_attnres.py", "linear_attention.py", "ops_delta_rule.py"} <= held["attnres"]
    assert not held["attnres"] & {"topology_additive.py", "topology_multigate.py", "moe.py"}
    linear = bundle(build(small(layers=1, attention=LINEAR)), "1.0")
    assert "residua_linear_attention.py" in linear and "residua_attention.py" not in linear


@pytest.mark.parametrize("name", CONFIGS)
def test_code_used_only_by_tools_is_not_exported(bundles, name):
    tools = {"topology_facts", "topology_ablation", "topology_inference", "edges"}
    assert not {f"residua_{tool}.py" for tool in tools} & bundles[name].keys()
    assert "torch._subclasses" not in "".join(bundles[name].values())


def test_exported_config_methods_find_their_imports():
    """`MultiGate.check` calls a function that uses `math`."""
    source = tables_source({"MultiGate": MultiGate}, {"check"}).replace("from .residua_plain", f"from {plain.__name__}")
    made: dict[str, Any] = {}
    exec(source, made)
    made["MultiGate"]().check(layers=12)
    with pytest.raises(ValueError, match="leaves no gated sublayers"):
        made["MultiGate"](streams=8).check(layers=2)


@pytest.mark.parametrize("name", CONFIGS)
def test_exported_files_import_only_torch_and_transformers(bundles, name):
    allowed = sys.stdlib_module_names | {"torch", "transformers"}
    for file, text in bundles[name].items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, file
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in bundles[name], file
            elif isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] in allowed, file


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_finds_every_file(bundles, name, tmp_path):
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    for file, text in bundles[name].items():
        (tmp_path / file).write_text(text)
    found = dynamic.get_relative_import_files(tmp_path / "modeling_residua.py")
    assert {Path(f).name for f in found} | {"modeling_residua.py"} == set(bundles[name])


def test_files_have_no_unknown_or_unused_names(bundles, tmp_path):
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    for name, files in bundles.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    done = subprocess.run([ruff, "check", "--isolated", "--select", "F,E9", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_copied_code_differs_from_the_library_only_in_imports(bundles):
    def body(text: str) -> list[str]:
        lines = text[text.index("\n\n\n") :].splitlines()
        return [line for line in lines if not line.strip().startswith("from ")]

    for module in ("residua.model.norm", "residua.model.topology.multigate", "residua.model.sdpa"):
        file = f"residua_{module.removeprefix('residua.model.').replace('.', '_')}.py"
        source, copied = modules.source(module), bundles["mgr"][file]
        assert copied.startswith(f"# {module.replace('.', '/')}.py, copied with its imports rewritten")
        assert body(copied) == body(source) and len(body(source)) > 50


def test_every_file_states_its_origin_and_licence(bundles):
    for file, text in bundles["mgr"].items():
        first, *licence = text.splitlines()[:3]
        assert first.endswith("by `residua export`, Residua 1.0"), file
        assert licence == ["# SPDX-FileCopyrightText: The Residua developers", "# SPDX-License-Identifier: Apache-2.0"]


def test_a_library_change_changes_the_exported_code(monkeypatch):
    read = modules.source
    monkeypatch.setattr(modules, "source", lambda module: read(module).replace("state[0] + y", "state[0] - y"))
    files = bundle(build(CONFIGS["additive"]), "1.0")
    assert "h = state[0] - y" in files["residua_topology_additive.py"]


def test_configuration_files_differ_if_the_code_differs(bundles):
    assert len({files["configuration_residua.py"] for files in bundles.values()}) == len(bundles)
