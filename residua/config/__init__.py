"""User settings: choices, models, runs and presets. Nothing here imports torch."""
