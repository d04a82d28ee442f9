"""Self-contained HTML pages with interactive plots, shared by the study, the diagnosis and the quantization."""

from residua.report.cards import Card, Owner
from residua.report.cells import Cell, Column, Link, Series, Sorted, Value
from residua.report.page import Page
from residua.report.section import Picture, Section, Tone
from residua.report.strips import Bar, Spread, Strip, Track

__all__ = [
    "Bar", "Card", "Cell", "Column", "Link", "Owner", "Page", "Picture", "Section", "Series", "Sorted", "Spread",
    "Strip", "Tone", "Track", "Value",
]  # fmt: skip
