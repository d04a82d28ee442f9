"""Training: optimizer, schedule, checkpoints, run folders. `residua.train.trainer.train` is where a run starts."""
