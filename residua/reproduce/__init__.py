"""The papers' tables and figures as studies: the paper's number next to ours, and a verdict on every claim."""
