"""Residua's models inside the engines of others."""
