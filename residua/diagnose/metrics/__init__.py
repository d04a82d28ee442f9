"""Metrics as running sums over observations: one file per thing looked at. They know nothing of models."""
