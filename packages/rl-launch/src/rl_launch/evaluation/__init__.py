"""Evaluations: the folder of one, its result, and comparison of two."""
