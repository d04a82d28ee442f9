"""Speeds up the training step from outside the model: working copies, graph rewrites, CUDA graphs, shared layers."""
