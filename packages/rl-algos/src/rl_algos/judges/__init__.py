"""Judges: models that score rollouts, what they are asked, and the limits that they are asked within."""
