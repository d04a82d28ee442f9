"""Modules of a person's own that add kinds of topologies and norms, imported before a configuration is refused.

They come from the environment variable RESIDUA_PLUGINS (names of modules, or paths of .py files, separated by commas)
and from the entry points `residua.plugins` of installed packages. Nothing in a run folder names one: opening a
stranger's folder must not run code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from residua.config.settings import PLUGINS, ConfigError

GROUP = "residua.plugins"

_loaded: set[str] = set()


def load_plugins() -> None:
    """Import every plugin that is not yet imported."""
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        if name not in _loaded:
            load = partial(_from_file, Path(name)) if name.endswith(".py") else partial(import_module, name)
            _load(name, f"{PLUGINS} names {name!r}, which", load)
    for point in _entry_points():
        if point.value not in _loaded:
            _load(
                point.value, f"the entry point {GROUP} of an installed package names {point.value!r}, which", point.load
            )


def _entry_points() -> EntryPoints:
    """Those of installed packages. Python opens a file of every package for it: once, until a package is installed."""
    return _found(tuple((place, os.stat(place).st_mtime_ns) for place in sys.path if os.path.isdir(place)))


@cache
def _found(places: tuple[tuple[str, int], ...]) -> EntryPoints:
    return entry_points(group=GROUP)


def _load(key: str, what: str, load: Callable[[], object]) -> None:
    _loaded.add(key)  # first: what a plugin does while it is imported may ask for plugins
    try:
        load()
    except (Exception, SystemExit) as error:
        _loaded.discard(key)
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise ConfigError(f"{what} cannot be imported ({reason}).") from error


def _from_file(path: Path) -> None:
    """Import a file as a module of its own name, so that its classes can be pickled and their source found."""
    path = path.expanduser().resolve()
    if not path.stem.isidentifier():
        raise ImportError(f"{path.stem!r} is not a name that Python can import: rename the file")
    known = sys.modules.get(path.stem)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() != path:
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
