"""What is installed, what runs on this machine, what is missing, and the command to get it."""
