"""Self-contained HTML pages with interactive plots, shared by the study, the diagnosis and the quantization."""

from residua.report.elements import Bar, Card, Cell, Column, Link, Owner, Series, Sorted, Spread, Strip, Track, Value
from residua.report.page import Page
from residua.report.section import Picture, Section, Tone

__all__ = [
    "Bar", "Card", "Cell", "Column", "Link", "Owner", "Page", "Picture", "Section", "Series", "Sorted", "Spread",
    "Strip", "Tone", "Track", "Value",
]  # fmt: skip
