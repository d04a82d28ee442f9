"""Modules of a person's own that add kinds of topologies and norms, imported before a configuration is refused.

They come from the environment variable RESIDUA_PLUGINS (names of modules, or paths of .py files, separated by commas)
and from the entry points `residua.plugins` of installed packages. Nothing in a run folder names one: opening a
stranger's folder must not run code.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import NamedTuple

from residua.config.settings import PLUGINS, ConfigError

GROUP = "residua.plugins"

_loaded: set[str] = set()
_packages: set[str] = set()
"""Modules that are plugins, or the packages that hold them; they stay known after a failed import."""
_files: dict[str, Path] = {}
"""Files that are plugins, by the names of their modules."""


class Place(NamedTuple):
    """A line of a plugin, and the error that came through it."""

    file: str
    line: int
    error: BaseException
    raised: bool = True
    """Whether the plugin itself raised the error, or code that it called."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def load_plugins() -> None:
    """Import every plugin that is not yet imported."""
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        if name not in _loaded:
            file = name.endswith(".py")
            load = partial(_from_file, Path(name)) if file else partial(import_module, name)
            _load(name, Path(name).stem if file else name, f"{PLUGINS} names {name!r}, which", load)
    for point in _entry_points():
        if point.value not in _loaded:
            whose = f"the entry point {GROUP} of an installed package names {point.value!r}, which"
            _load(point.value, point.value.partition(":")[0], whose, point.load)


def _entry_points() -> EntryPoints:
    """Those of installed packages. Python opens a file of every package for it: once, until a package is installed."""
    return _found(tuple((place, os.stat(place).st_mtime_ns) for place in sys.path if os.path.isdir(place)))


@cache
def _found(places: tuple[tuple[str, int], ...]) -> EntryPoints:
    return entry_points(group=GROUP)


def _load(key: str, module: str, what: str, load: Callable[[], object]) -> None:
    _loaded.add(key)  # first: what a plugin does while it is imported may ask for plugins
    package = module if module.startswith("residua.") else module.partition(".")[0]
    _packages.add(package)
    try:
        load()
    except (Exception, SystemExit) as error:
        _loaded.discard(key)
        if plugin_place(error, package) is None:  # it was not found, or another module has its name
            _packages.discard(package)
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
    _files[path.stem] = path
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


def plugin_place(error: BaseException, package: str | None = None) -> Place | None:
    """The innermost line of a plugin that an error, or one that led to it, came through; None without a plugin.

    `package` names one that need not have come from RESIDUA_PLUGINS.
    """
    packages = _packages if package is None else {package}
    return next(filter(None, (_place(link, packages) for link in causes(error))), None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, the one that it was raised from or after, and so on; also those that `from None` hides."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _place(error: BaseException, packages: set[str]) -> Place | None:
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__)]
    for depth, (frame, line) in enumerate(reversed(frames)):
        if _belongs(frame, packages):
            return Place(frame.f_code.co_filename, line, error, raised=depth == 0)
    if isinstance(error, SyntaxError) and error.filename and error.lineno and _holds(packages, error.filename):
        return Place(error.filename, error.lineno, error)
    # an error of torch.compile names the line that it was compiling, which did not run
    for file, line_number in reversed(re.findall(r'File "(.+?)", line (\d+)', str(error))):
        if Path(file).stem in packages:
            return Place(file, int(line_number), error)
    return None


def _holds(packages: set[str], file: str) -> bool:
    """Whether a file that Python could not read is that of a plugin, or lies in its package."""
    path = Path(file).resolve()
    return any(path.is_relative_to(place) for package in packages for place in _places_of(package))


def _places_of(package: str) -> list[Path]:
    """The file of a module, or the folders of a package; neither need have been imported."""
    if package in _files:
        return [_files[package]]
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # its parent is missing, or it was made without a file
        return []
    if spec is None:
        return []
    return [Path(place).resolve() for place in spec.submodule_search_locations or filter(None, [spec.origin])]


def _belongs(frame: FrameType, packages: set[str]) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == package or module.startswith(f"{package}.") for package in packages)
