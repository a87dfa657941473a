"""Environments that score completions: mathematics and reasoning-gym."""
