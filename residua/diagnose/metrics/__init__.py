"""All metrics. New files in this folder are found automatically.

Metrics do not depend on model classes: they read observations (`residua/diagnose/observe.py`).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from residua.diagnose.metric import Metric


def find_metrics() -> tuple[type[Metric], ...]:
    """The metric classes defined in this folder, in the order of their keys in diagnosis.json."""
    modules = [import_module(f"{__name__}.{entry.name}") for entry in iter_modules(__path__)]
    classes = [
        thing
        for module in modules
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Metric) and thing.__module__ == module.__name__
    ]
    return tuple(sorted(classes, key=lambda metric: metric.file_place))


METRICS = find_metrics()
