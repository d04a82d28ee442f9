"""The settings that a person writes: choices, models, runs and presets. Nothing here imports torch."""
