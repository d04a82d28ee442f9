"""The live page of runs in progress, served on this machine only: curves, telemetry, ETA, recent messages."""
