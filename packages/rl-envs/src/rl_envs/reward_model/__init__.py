"""Responses scored by a reward model."""
