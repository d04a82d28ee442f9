"""The papers' tables and figures as studies: the paper's number beside ours, and a verdict on every claim."""
