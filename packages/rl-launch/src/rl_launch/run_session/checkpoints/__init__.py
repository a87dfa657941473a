"""Checkpoints of a run: written, listed, verified and restored."""
