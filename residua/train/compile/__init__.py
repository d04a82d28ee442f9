"""The training step made fast from outside the model: working copies, graph rewrites, CUDA graphs, shared layers."""
