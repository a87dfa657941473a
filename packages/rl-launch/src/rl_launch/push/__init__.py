"""Checkpoints that a run pushes: to the Hugging Face hub, an object store or a folder."""
