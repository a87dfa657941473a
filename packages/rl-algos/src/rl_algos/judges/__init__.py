"""Judges: models that score rollouts, their questions, and the limits of asking."""
