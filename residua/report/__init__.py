"""Self-contained HTML pages with interactive plots, shared by the study and the diagnosis."""

from residua.report.cards import Card
from residua.report.page import Column, Link, Page, Section, Value
from residua.report.strips import Bar, Spread, Strip, Track

__all__ = ["Bar", "Card", "Column", "Link", "Page", "Section", "Spread", "Strip", "Track", "Value"]
