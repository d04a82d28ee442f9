"""Training on one process: trainer, step, optimizer, telemetry. `residua.train.trainer.train` is where a run starts."""
