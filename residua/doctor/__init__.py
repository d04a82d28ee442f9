"""Report installed and missing packages, check this machine, and name the command that fixes each fault."""
