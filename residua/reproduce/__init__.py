"""Run the papers' tables and figures as studies: the paper's numbers next to ours, and a verdict on every claim."""
