"""The live page: the frame, colours and plots of all pages, filled by `runs.js` and `watch.js`."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from residua.report import Page
from residua.report.theme import embeddable
from residua.watch.watched import Watched

FIGURES = {
    "loss": ("Training loss", "nats per token, smoothed over ten lines; the faint line is not smoothed"),
    "validation": ("Validation loss", "nats per token, on the same text every time"),
    "tokens_per_second": ("Speed", "tokens per second"),
    "grad_norm": ("Gradient norm", "before clipping; a jump often comes before the loss does"),
    "peak": ("Peak |h|", "the largest value that any sublayer reads; tenfold growth often comes before a divergence"),
    "sink_ratio": ("Residual-sink ratio", "mean |h| of the largest dimension over the median dimension's, worst layer"),
    "lr": ("Learning rate", "of the first group of parameters"),
    "memory_gib": ("Memory", "GiB, the peak so far"),
    "mfu": ("Model FLOPs utilisation", "share of the GPU's peak"),
    "heaviest": ("Load of the experts", "of the heaviest and (dotted) the lightest; 1 is a fair share"),
}
"""What is drawn: title and caption. A figure without any value is not shown."""


def watch_page(watched: Watched, interval: float) -> str:
    """The page's HTML; it asks for news every `interval` seconds."""
    title = ", ".join(folder.resolve().name for folder in watched.folders)
    page = Page(title, "Asking for the first numbers.")
    now = page.section("Now")
    now.slot("now")
    now.slot("runs")
    curves = page.section("Curves")
    curves.slot("axis")
    curves.slots_beside({name: (words[0], words[1]) for name, words in FIGURES.items()})
    page.section("Messages").slot("messages")
    settings = embeddable(json.dumps({"interval": interval, "figures": list(FIGURES)}))
    script = f"const watching = {settings};\n{_asset('runs.js')}\n{_asset('watch.js')}"
    return page.html(live=script, style=_asset("watch.css"))


@cache
def _asset(name: str) -> str:
    return files("residua.watch").joinpath(name).read_text(encoding="utf-8")
