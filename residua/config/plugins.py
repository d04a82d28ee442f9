"""Families of choices that users can extend (topologies, anchors and norms, docs/extend.md), and plugin modules.

Plugins are imported before a configuration is refused. They come from the environment variable RESIDUA_PLUGINS
(module names or paths of .py files, separated by commas) and from the entry points `residua.plugins` of installed
packages. A run folder never names a plugin: opening an untrusted folder must not run code.
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
from typing import Annotated, Any, ClassVar, NamedTuple, Self, Union, get_args

from pydantic import Field, TypeAdapter

from residua.config.settings import PLUGINS, ConfigError, Frozen
from residua.errors import UserError

GROUP = "residua.plugins"

_loaded: set[str] = set()
_packages: set[str] = set()
"""Plugin modules, or the packages that contain them; kept after a failed import."""
_files: dict[str, Path] = {}
"""Files that are plugins, by the names of their modules."""

_MEMBERS: dict[type[Family], dict[str, type[Family]]] = {}
_ADAPTERS: dict[type[Family], TypeAdapter[Any]] = {}


class Family(Frozen):
    """The root of a family: its direct subclasses collect members, each with its own `kind`."""

    takes_plugins: ClassVar[bool] = True

    kind: str

    @classmethod
    def join(cls, *choices: type[Family]) -> None:
        """Add choices to the family, by the default of their `kind`."""
        known = _MEMBERS.setdefault(cls, {})
        for choice in choices:
            field = choice.model_fields["kind"]
            kind = field.default
            if get_args(field.annotation) != (kind,):
                raise UserError(f'{choice.__name__} has no kind: give it `kind: Literal["name"] = "name"`.')
            other = known.get(kind)
            if other is not None and (other.__module__, other.__name__) != (choice.__module__, choice.__name__):
                raise UserError(
                    f"{choice.__module__}.{choice.__name__} has kind = {kind!r}, which {other.__module__}."
                    f"{other.__name__} already has: choose another."
                )
            known[kind] = choice
        _ADAPTERS.pop(cls, None)

    @classmethod
    def choose(cls, value: Any) -> Self:
        """Validate a table with a `kind`; a kind that is still unknown may come from a plugin."""
        kind = value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in _MEMBERS[cls]:
            load_plugins()
        if cls not in _ADAPTERS:
            union: Any = Union[tuple(_MEMBERS[cls].values())]  # noqa: UP007  # from a tuple
            tagged: Any = Annotated[union, Field(discriminator="kind")]
            _ADAPTERS[cls] = TypeAdapter(tagged)
        chosen: Self = _ADAPTERS[cls].validate_python(value)
        return chosen

    @classmethod
    def alternatives(cls) -> list[type[Frozen]]:
        return list(_MEMBERS[cls].values()) if cls in _MEMBERS else [cls]


class Place(NamedTuple):
    """A line of a plugin, and the error that passed through it."""

    file: str
    line: int
    error: BaseException
    raised: bool = True
    """Whether the plugin itself raised the error, or code that it called."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def load_plugins() -> None:
    """Import all plugins that are not imported yet."""
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        if name not in _loaded:
            file = name.endswith(".py")
            load = partial(_from_file, Path(name)) if file else partial(import_module, name)
            _load(name, Path(name).stem if file else name, f"{PLUGINS} names {name!r}, which", load)
    # Python opens a file of every package to find them: once, until a package is installed
    changed = tuple((place, os.stat(place).st_mtime_ns) for place in sys.path if os.path.isdir(place))
    for point in _entry_points(changed):
        if point.value not in _loaded:
            whose = f"the entry point {GROUP} of an installed package names {point.value!r}, which"
            _load(point.value, point.value.partition(":")[0], whose, point.load)


@cache
def _entry_points(changed: tuple[tuple[str, int], ...]) -> EntryPoints:
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
    """Import a file under its own name, so that its classes can be pickled and their source found."""
    path = path.expanduser().resolve()
    if not path.stem.isidentifier():
        raise ImportError(f"{path.stem!r} is not a valid Python module name: rename the file")
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
    """The innermost plugin line that an error, or one of its causes, passed through; None without a plugin.

    `package` names one that need not have come from RESIDUA_PLUGINS.
    """
    packages = _packages if package is None else {package}
    return next(filter(None, (_place(link, packages) for link in causes(error))), None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, the one that it was raised from or after, and so on; also those that `from None` hides."""
    link: BaseException | None = error
    visited: set[int] = set()
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _place(error: BaseException, packages: set[str]) -> Place | None:
    for depth, (frame, line) in enumerate(reversed(list(walk_tb(error.__traceback__)))):
        module = str(frame.f_globals.get("__name__", ""))
        if any(f"{module}.".startswith(f"{package}.") for package in packages):
            return Place(frame.f_code.co_filename, line, error, raised=depth == 0)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # Python could not read the file
        path = Path(error.filename).resolve()
        if any(path.is_relative_to(place) for package in packages for place in _places_of(package)):
            return Place(error.filename, error.lineno, error)
    # an error of torch.compile names the line that it was compiling, which did not run
    for file, line_number in reversed(re.findall(r'File "(.+?)", line (\d+)', str(error))):
        if Path(file).stem in packages:
            return Place(file, int(line_number), error)
    return None


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
