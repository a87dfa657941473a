"""Checks that a model family trains correctly on a backend, on tiny models."""
