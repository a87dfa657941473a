"""Estimates of a run's memory, time and cost from its config alone, without torch and without a GPU."""
