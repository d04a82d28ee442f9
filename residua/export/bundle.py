"""The Python files of an export: complete copies of the modules that a model uses, with their imports rewritten.

Why whole modules: an exported folder must run without Residua, and people read it. A copy that differs from the library
only in its import lines is easy to trust, and any valid module can be copied. Extracting only the definitions that a
model needs gave one shorter file. But it took 1,100 lines of partial evaluation, which ordinary Python code broke.

Why one flat folder: transformers copies the files that it finds in lines `from .file import …`, but no folders.
`residua/model/topology/multigate.py` becomes `residua_topology_multigate.py`.

The walk starts at `residua.export.modeling` and follows every import of Residua's and the user's own modules. Four
things are not copied. We replace them where they are imported:
- `residua.config` needs pydantic. `residua_config.py` holds the tables as plain classes.
- `residua.ops` needs Triton. An operator becomes its plain PyTorch function, a module of kernels `no_kernels`.
- `build_topology`, `build_norm`, `build_mix` and `build_source` choose by the configuration's `kind`. Those in
  `residua_parts.py` name the classes that the model was built with, which Residua need not know.
- Parts that this model does not use, such as experts, become `Unused`. So do imports that Residua's modules need only
  for its tools (`STAYING`), and everything above `residua.model`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from residua import ops
from residua.export import modules
from residua.export.imports import ITSELF, Place, import_lines, rewritten, with_itself
from residua.export.tables import has_tables, tables_source
from residua.model.anchor_kinds import ANCHORS
from residua.model.decoder import Decoder
from residua.model.norm import NORMS
from residua.ops._runtime.backend import Operator

CONFIG, OPS, PARTS, PLAIN = "residua_config", "residua_ops", "residua_parts", "residua_plain"
FILES = {
    "residua.export.modeling": "modeling_residua",
    "residua.export.configuration": "configuration_residua",
    "residua.export.plain": PLAIN,
}
CHOOSING = (
    "residua.model.anchor_kinds",
    "residua.model.anchor_sharing",
    "residua.model.decoder",
    "residua.model.topology",
)
"""The modules that import parts of every kind, of which a model uses only some."""
STAYING = (
    "residua.model.equivalence",
    "residua.model.topology.facts",
    "residua.model.topology.inference",
)
"""Modules that a model's parts only need for `residua quantize`, `diagnose`, `bench` and `generate`."""
TRAVELLING = ("residua.model.", "residua.config.", "residua.ops", "residua.export.", "residua.errors")
OF_PYDANTIC = ("Field", "field_validator", "model_validator")
LICENCE = "# SPDX-FileCopyrightText: The Residua developers\n# SPDX-License-Identifier: Apache-2.0\n"
BUILDERS = ("build_topology", "build_norm", "build_mix", "build_source")
PARTS_SOURCE = '''"""The classes that the configuration of this model chooses."""

from __future__ import annotations

from typing import Any

{imports}


def build_topology(config: Any, sublayers: int, width: int) -> Topology:
    return Topology(config, sublayers, width)


def build_norm(config: Any, width: int) -> Norm:
    return Norm(config, width)


def build_mix(config: Any, place: Any) -> Any:
    return Layer(config, place)


def build_source(config: Any, shape: Any, width: int, *, std: float) -> Any:
    return Source(config, shape, width, std=std)
'''
OPS_SOURCE = '''"""The operators of this model in plain PyTorch. The installed Residua has kernels for them."""

{imports}

__all__ = {names}

for operator in [{operators}]:
    operator.reference = operator  # as in Residua, where an operator has a fused path too
'''


def bundle(model: Decoder, version: str) -> dict[str, str]:
    """Generate the Python files of an export of `model`, text by file name."""
    texts = Bundle(model).texts(version)
    # transformers treats configuration files with the same text as one class, and runs the code that it saw first for
    # all of them: the fingerprint makes the text depend on the code.
    fingerprint = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:16]
    texts["configuration_residua"] += f'\n\nCODE = "{fingerprint}"  # of all files of code\n'
    return {f"{name}.py": text for name, text in texts.items()}


def license_text() -> str:
    """The license of the copies: the file in the repository, or in the installed package."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        root = Path(str(next(file.locate() for file in files("residua") or () if file.name == "LICENSE"))).parent
    return (root / "LICENSE").read_text(encoding="utf-8")


def users_modules(model: Decoder) -> set[str]:
    """The modules outside Residua that define classes of the model, without those of other libraries."""
    chosen = {part.__module__ for part in _chosen(model).values()}
    return {m for m in _homes(model) | chosen if not _is_residuas(m) and (m in chosen or modules.is_users(m))}


def _chosen(model: Decoder) -> dict[str, Any]:
    """The classes and functions that the configuration's kinds stand for, by their names in `residua_parts.py`."""
    anchors = ANCHORS[type(model.config.anchors)]
    parts = {"Topology": type(model.topology), "Norm": NORMS[type(model.config.norm)]}
    return parts | {"Layer": anchors.layer, "Source": anchors.source}


def _homes(model: Decoder) -> set[str]:
    """The modules that define the model's classes and their bases."""
    return {base.__module__ for part in model.modules() for base in type(part).__mro__}


def _is_residuas(module: str) -> bool:
    return module.split(".")[0] == "residua"


def _tables(value: Any) -> Iterator[BaseModel]:
    """Yield a table and the tables nested in it."""
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _tables(getattr(value, name))


class Bundle:
    """Collects the files of one model."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.homes, self.users = model, _homes(model), users_modules(model)
        self.bundled_packages = {"residua", *(module.split(".")[0] for module in self.users)}
        self.files = dict(FILES)
        self.waiting: list[str] = []
        self.operators: dict[str, Place] = {}
        self.tables: dict[str, Any] = {}
        self.imported_as_modules: set[str] = set()

    def texts(self, version: str) -> dict[str, str]:
        """All files, by name without `.py`."""
        by = f"by `residua export`, Residua {version}"
        copies: dict[str, str] = {}
        attributes: set[str] = set()
        parts = self._parts_source()
        self.waiting += [*FILES, *sorted(self.users)]
        while self.waiting:
            module = self.waiting.pop()
            if self._file(module) not in copies:
                text = modules.source(module)
                attributes |= modules.parsed(text).attributes
                path = module.replace(".", "/") + ("/__init__.py" if modules.is_package(module) else ".py")
                note = f"# {path}, copied with its imports rewritten {by}\n"
                licence = LICENCE if _is_residuas(module) else ""
                copies[self._file(module)] = note + licence + rewritten(text, module, self)
        generated = {PARTS: parts, CONFIG: tables_source(self._config(), attributes)}
        if self.operators:
            generated[OPS] = self._operators_source()
        texts = copies | {name: f"# generated for this model {by}\n{LICENCE}{text}" for name, text in generated.items()}
        return {n: with_itself(t) if n in self.imported_as_modules else t for n, t in sorted(texts.items())}

    def travels(self, module: str) -> bool:
        """Return whether imports of a module are rewritten: Residua's modules, the user's, and pydantic."""
        return module.split(".")[0] in self.bundled_packages or module == "pydantic" or modules.is_users(module)

    def place(self, importer: str, module: str, name: str | None) -> Place | None:
        """Find `name` of a module (the module itself if None) for `importer`; None if the import is unchanged."""
        if module == "pydantic":
            return Place(PLAIN, name) if name in OF_PYDANTIC else None
        if not self.travels(module):
            return None
        if name in BUILDERS and _is_residuas(module):
            return Place(PARTS, str(name))
        if module in FILES and name is not None:  # do not import it: transformers may not be installed
            return Place(FILES[module], name)
        try:
            value = import_module(module) if name is None else modules.member(module, name)
        except ImportError:  # the importing module handles this, or is not run
            return Place(PLAIN, "no_kernels") if module.startswith("residua.ops") else None
        if isinstance(value, ModuleType) and (name is None or self.travels(value.__name__)):
            return self._module_place(importer, value.__name__)
        assert name is not None
        home, own_name = (module, name) if isinstance(value, ModuleType) else modules.origin(module, name)
        if not self.travels(home):  # from another library, imported by `module`
            home, own_name = module, name
        if stand_in := self._stand_in(importer, home):
            return stand_in
        if has_tables(home):
            self.tables[own_name] = getattr(import_module(home), own_name)
            return Place(CONFIG, own_name)
        return Place(self._file(home), own_name)

    def _module_place(self, importer: str, module: str) -> Place:
        """Find the place of a module itself; if it holds operators or tables, include those that `importer` uses."""
        named = modules.parsed(modules.source(importer)).attributes & vars(import_module(module)).keys()
        if module == "residua.ops":
            places = {name: self.place(importer, module, name) for name in named}
            self.operators |= {name: place for name, place in places.items() if place is not None}
            file = OPS
        elif stand_in := self._stand_in(importer, module):
            return stand_in
        elif has_tables(module):
            self.tables |= {name: getattr(import_module(module), name) for name in named}
            file = CONFIG
        else:
            file = self._file(module)
        self.imported_as_modules.add(file)
        return Place(file, ITSELF)

    def _stand_in(self, importer: str, module: str) -> Place | None:
        """Find the replacement for a Residua module that is not exported; None if it is exported."""
        if not _is_residuas(module):
            return None
        if not module.startswith(TRAVELLING) or (module in STAYING and _is_residuas(importer)):
            return Place(PLAIN, "Unused")
        if module.startswith("residua.ops") and modules.needs(module, "triton"):
            return Place(PLAIN, "no_kernels")
        if importer in CHOOSING and modules.defines_parts(module) and module not in self.homes:
            return Place(PLAIN, "Unused")
        return None

    def _file(self, module: str) -> str:
        """The file that a module is copied to."""
        if module not in self.files:
            left_out = ("model", "export", "_runtime", "reference") if _is_residuas(module) else ()
            name = "_".join(part for part in module.split(".") if part not in left_out)
            self.files[module] = name if name not in self.files.values() else module.replace(".", "_")
            self.waiting.append(module)
        return self.files[module]

    def _parts_source(self) -> str:
        chosen = _chosen(self.model).items()
        places = {name: Place(self._file(part.__module__), part.__name__) for name, part in chosen}
        return PARTS_SOURCE.format(imports="\n".join(import_lines(places)))

    def _operators_source(self) -> str:
        names = sorted(self.operators)
        operators = ", ".join(name for name in names if isinstance(getattr(ops, name), Operator))
        imports = "\n".join(import_lines(self.operators))
        return OPS_SOURCE.format(imports=imports, names=json.dumps(names), operators=operators)

    def _config(self) -> dict[str, Any]:
        """The tables that the copies use, and those in the configuration."""
        made_of = {type(t) for t in _tables(self.model.config) if _is_residuas(type(t).__module__)}
        return self.tables | {table.__name__: table for table in made_of}
