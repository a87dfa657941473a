"""Proximal policy optimization with a critic."""
