"""The modelling file is the library's own source, and only the parts that a model uses."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from residua.export import sources
from residua.export.source import configuration_source, modeling_source
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
def files() -> dict[str, str]:
    return {name: modeling_source(config) for name, config in CONFIGS.items()}


def classes(source: str) -> set[str]:
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def test_a_prenorm_model_holds_no_other_topology_norm_anchor_or_mixer(files):
    expected = {"Table", "Mixer", "SoftmaxAttentionTable", "ModelConfig", "Now", "Context", "HeadShape"}
    expected |= {"Embedding", "Projection", "RMSNorm", "QKNorm", "SoftmaxAttention", "GatedFFN", "Unmixed", "NoSource"}
    expected |= {"Topology", "Additive", "Sublayer", "Decoder", "KeyValues", "Recurrent", "Past"}
    expected |= {"ResiduaPreTrainedModel", "ResiduaModel", "ResiduaForCausalLM"}
    assert classes(files["additive"]) == expected


def test_each_model_holds_its_own_parts(files):
    assert {"MultiGate", "Gates", "Pool", "ExoSource", "Mix", "GatedNorm"} <= classes(files["mgr"])
    assert {"BlockAttnRes", "Read", "GatedDeltaNet", "ShortConvolution", "HybridAttention", "DyT"} <= classes(
        files["attnres"]
    )
    assert not {"MultiGate", "RMSNorm2", "ExoSource", "FullAttnRes"} & classes(files["attnres"])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_imports_torch_and_transformers_only(files, name):
    from_where = set()
    for node in ast.walk(ast.parse(files[name])):
        if isinstance(node, ast.Import):
            from_where |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            from_where.add("." * node.level + (node.module or "").split(".")[0])
    standard = {
        "__future__",
        "abc",
        "collections",
        "contextlib",
        "functools",
        "importlib",
        "itertools",
        "math",
        "typing",
    }
    assert from_where <= standard | {"torch", "transformers", ".configuration_residua"}
    for word in ("triton", "deferred", "tap(", " choices.", " ops.", "(ops.", "pydantic", "isinstance(config"):
        assert word not in files[name], word


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_has_no_unknown_or_unused_names(files, name, tmp_path):
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    path = tmp_path / "modeling_residua.py"
    path.write_text(files[name])
    done = subprocess.run([ruff, "check", "--isolated", "--select", "F,E9", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_code_docstrings_and_comments_are_those_of_the_library(files):
    library = sources.Sources().text("residua.model.norm").text
    body = library[library.index("class RMSNorm") : library.index("class PreAffine")].strip()
    assert body.replace("choices.RMSNorm", "Table").replace("ops.rms", "rms") in files["additive"]
    assert "# softmax with exp(sink) in the denominator" in files["additive"]
    assert "# residua/model/norm.py" in files["additive"]


def test_a_change_in_the_library_is_a_change_in_the_file(monkeypatch):
    read = sources.Sources.text

    def changed(self, module):
        text = read(self, module)
        if module == "residua.model.topology.additive" and "state[0] + y" in text.text:
            self.texts[module] = text = type(text)(text.text.replace("state[0] + y", "state[0] - y"))
        return text

    monkeypatch.setattr(sources.Sources, "text", changed)
    assert "h = state[0] - y" in modeling_source(CONFIGS["additive"])


def test_lines_are_readable(files):
    for source in files.values():
        assert max(len(line) for line in source.splitlines()) <= 125
        assert not re.search(r"\n{4}", source)


def test_configuration_files_of_different_code_differ(files):
    assert len({configuration_source(source) for source in files.values()}) == len(files)
