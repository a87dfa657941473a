"""Monitoring of a run: readings of machines, workers and replicas, their endpoint, traces and notifications."""
