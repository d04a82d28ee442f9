"""A plugin topology or norm is exported, in whichever ordinary Python it is written."""

import sys
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest
import torch

from residua.data.tokenizer import Tokenizer
from residua.export.folder import write_folder
from residua.storage.load import load
from tests.export.exported import VOCABULARY, bytes_config, in_transformers, trained_like
from tests.model.small import small
from tests.model.test_extend import OWN, own

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("copied_code")]
pytest.importorskip("transformers")

__all__ = ["own"]  # a fixture: the files of docs/extend.md as plugins

BASE = '''
from residua.model.topology import State as State
from residua.model.topology import Topology


class Scaled(Topology):
    """h ← h + g_k y_k."""

    def open(self, x):
        return x, (x,)
'''

# Each is the source of a topology whose class is called Mine; `base.py` above is in the same folder.
IDIOMS = {
    "functional as F": """
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.model.topology import State, Topology


class Mine(Topology):
    def __init__(self, config, sublayers: int, width: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(sublayers, width))

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0] + F.softplus(self.gains[k]) * F.normalize(y, dim=-1)
        return h, (h,)
""",
    "relative import": """
import torch
from torch import nn

from . import base as beside
from .base import Scaled, State


class Mine(Scaled):
    def __init__(self, config, sublayers: int, width: int) -> None:
        super().__init__()
        assert isinstance(self, beside.Scaled)
        self.gains = nn.Parameter(torch.ones(sublayers, width))

    def step(self, k, y, state: State):
        h = state[0] + self.gains[k] * y
        return h, (h,)
""",
    "modules by name": """
import torch

import residua
import residua.config.choices
import residua.model.topology.base as base
import residua.ops.rms_norm, math


class Mine(base.Topology):
    def __init__(self, config: residua.config.choices.Additive, sublayers: int, width: int) -> None:
        super().__init__()
        self.gains = torch.nn.Parameter(torch.ones(sublayers, width))

    def open(self, x: torch.Tensor) -> tuple[torch.Tensor, base.State]:
        return residua.ops.rms(x), (x,)

    def step(self, k: int, y: torch.Tensor, state: base.State) -> tuple[torch.Tensor, base.State]:
        h = state[0] + residua.ops.rms_norm(y, self.gains[k]) / math.sqrt(2)
        return h, (h,)
""",
    "type checking": """
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from residua.config.model import ModelConfig
    from residua.model.topology import State, Topology
    from residua.train.trainer import Trainer

from residua.model import topology


class Mine(topology.Topology):
    def __init__(self, config: object, sublayers: int, width: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(sublayers, width))

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0] + self.gains[k] * y
        return h, (h,)

    def of(self, config: ModelConfig, trainer: Trainer) -> Topology:
        return self
""",
    "constant and helper": '''
"""A constant, a helper function and a table of functions of the module's own."""

import torch
from torch import Tensor, nn

from residua import ops
from residua.model.topology import Initialization, State, Topology

START = 0.5
_SHAPES = {"tanh": torch.tanh, "none": lambda y: y}


def _bounded(y: Tensor, kind: str = "tanh") -> Tensor:
    return START * _SHAPES[kind](y)


class Mine(Topology):
    def __init__(self, config, sublayers: int, width: int) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.full((width,), START)) for _ in range(sublayers))

    def initialization(self) -> Initialization:
        return Initialization(output_gain=START)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0] + _bounded(ops.rms_norm(y, self.gains[k]))
        return h, (h,)
''',
    "classes and decorators": """
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from residua.model.taps import tap
from residua.model.topology.base import *


class Shape(NamedTuple):
    sublayers: int
    width: int


@dataclass(frozen=True)
class Start:
    gain: float = 0.5


@cache
def start(shape: Shape) -> Start:
    return Start(1 / shape.sublayers)


class Mine(Topology):
    def __init__(self, config, sublayers: int, width: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.full((sublayers, width), start(Shape(sublayers, width)).gain))

    def open(self, x) -> "tuple[object, State]":
        return x, (x,)

    def step(self, k, y, state):
        h = state[0] + self.gains[k] * y
        tap(f"depth.{k}.gain", lambda: self.gains[k])
        return h, (h,)
""",
    "nested and conditional": """
try:
    from residua.no_such_module import gain
except ImportError:
    gain = None
try:
    import no_such_library
except ImportError: no_such_library = None
import math; import torch

from residua.config import choices
from residua.model.topology import Topology


class Mine(Topology):
    def __init__(self, config: choices.Topology, sublayers: int, width: int) -> None:
        super().__init__()
        assert isinstance(config, choices.Additive) and not isinstance(config, choices.MultiGate)
        self.gains = torch.nn.Parameter(torch.ones(sublayers, width) * (1.0 if gain is None else gain))

    def open(self, x):
        return x, (x,)

    def step(self, k, y, state):
        from residua.ops import rms as normed

        def scaled(factors):
            return [factor * normed(y) for factor in factors if no_such_library is None]

        h = state[0] + sum(scaled([self.gains[k], math.pi])) * (lambda a: a / 2)(1.0)
        return h, (h,)
""",
}


@pytest.mark.parametrize("idiom", IDIOMS)
@torch.no_grad()
def test_a_plugin_topology_is_exported_in_every_idiom(idiom: str, tmp_path: Path, monkeypatch) -> None:
    package = f"plugin_{idiom.replace(' ', '_')}"
    (tmp_path / package).mkdir()
    for name, text in {"__init__": "", "base": BASE, "mine": IDIOMS[idiom]}.items():
        (tmp_path / package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()
    mine = import_module(f"{package}.mine").Mine
    model = trained_like(bytes_config(small(layers=2)))
    model.topology = mine(model.config.topology, model.config.sublayers, model.config.width)
    for parameter in model.topology.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path / "exported"
    difference = write_folder(model, Tokenizer.bytes(), folder)
    assert difference is not None and difference < 1e-5
    # transformers must not find the plugin itself
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    tokens = torch.randint(VOCABULARY, (2, 9))
    for settings in ({"implementation": "file"}, {}):
        exported = in_transformers(folder, **settings)
        torch.testing.assert_close(exported(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    assert not any("residua." in line for line in _imports(folder))


@torch.no_grad()
def test_the_documented_topology_and_norm_are_exported(own: Path, tmp_path: Path) -> None:
    model = trained_like(bytes_config(small(layers=2, **OWN)))
    folder = tmp_path / "exported"
    assert write_folder(model, Tokenizer.bytes(), folder) == 0
    assert {"channel_gain.py", "l1_norm.py"} <= {path.name for path in folder.iterdir()}
    assert "SPDX" not in (folder / "l1_norm.py").read_text()  # a user's own file has its own licence
    tokens = torch.randint(VOCABULARY, (2, 9))
    for implementation in ("file", "library"):
        exported = in_transformers(folder, implementation=implementation)
        torch.testing.assert_close(exported(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    again = load(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def _imports(folder: Path) -> list[str]:
    lines = [line.strip() for path in folder.glob("*.py") for line in path.read_text().splitlines()]
    return [line for line in lines if line.startswith(("import ", "from ")) and "no_such" not in line]


def test_class_of_the_running_script_is_refused(tmp_path: Path) -> None:
    from residua.model.topology.additive import Additive

    model = trained_like(bytes_config(small(layers=1)))
    here = type("Here", (Additive,), {"__module__": "__main__"})
    model.topology = here(model.config.topology, model.config.sublayers, model.config.width)
    with pytest.raises(
        ValueError, match=r"__main__ cannot be exported: define the model's classes in an importable \.py file"
    ):
        write_folder(model, Tokenizer.bytes(), tmp_path / "out")
