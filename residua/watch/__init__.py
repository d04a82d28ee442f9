"""The growing page of runs under way, served on this machine only: curves, telemetry, ETA, the last messages."""
