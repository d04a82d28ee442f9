"""Files and folders: atomic writes, run folders, checkpoints, and loading a model from any folder."""
