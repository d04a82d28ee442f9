"""Modules of a person's own that add kinds of topologies and norms, imported before a configuration is refused.

They come from the environment variable RESIDUA_PLUGINS (names of modules, or paths of .py files, separated by commas)
and from the entry points `residua.plugins` of installed packages. Nothing in a run folder names one: opening a
stranger's folder must not run code.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from residua.config.settings import PLUGINS, ConfigError

GROUP = "residua.plugins"

_loaded: set[str] = set()


def load_plugins() -> None:
    """Import every plugin that is not yet imported."""
    for name in os.environ.get(PLUGINS, "").split(","):
        if name.strip() and name.strip() not in _loaded:
            _load(name.strip())
    if GROUP not in _loaded:
        _loaded.add(GROUP)
        for point in entry_points(group=GROUP):
            point.load()


def _load(name: str) -> None:
    _loaded.add(name)  # first: what a plugin does while it is imported may ask for plugins
    try:
        _from_file(Path(name)) if name.endswith(".py") else import_module(name)
    except Exception as error:
        _loaded.discard(name)
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{PLUGINS} names {name!r}, which cannot be imported ({reason}).") from error


def _from_file(path: Path) -> None:
    """Import a file as a module of its own name, so that its classes can be pickled and their source found."""
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None:
        if getattr(known, "__file__", None) != str(path):
            raise ImportError(f"a module called {path.stem} is already imported: rename the file")
        return
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
