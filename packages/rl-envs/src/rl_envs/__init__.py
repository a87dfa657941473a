"""Environments that score completions: mathematics, reasoning-gym and reward models."""
