"""Decoding one or two rows: all layers of a model and its final norm in one cooperative launch.

At size S it is twice as fast as one launch per operation (`ops/inference`), which serves all other cases. See
docs/whole-layers.md.
"""
