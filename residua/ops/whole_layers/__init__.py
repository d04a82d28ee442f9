"""Decoding one or two rows: all layers of a model and its final norm in one cooperative launch.

Twice as fast at S as a launch for each operation (`ops/inference`), which serves everything else: docs/whole-layers.md.
"""
