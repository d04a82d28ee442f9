"""Speed-ups of the training step outside the model: working copies, graph rewrites, CUDA graphs, shared layers."""
