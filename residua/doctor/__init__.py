"""Installed and missing packages, checks of this machine, and the command that fixes each fault."""
