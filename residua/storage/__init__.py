"""Folders: runs, checkpoints, and loading a model from any folder."""
