"""Self-contained HTML pages with interactive plots, shared by the study and the diagnosis."""

from residua.report.page import Column, Link, Page, Section, Value

__all__ = ["Column", "Link", "Page", "Section", "Value"]
