"""Datasets: read, turned into prompts and training rows, and streamed in a repeatable order."""
