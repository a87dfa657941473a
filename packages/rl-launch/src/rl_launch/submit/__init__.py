"""Runs as jobs of a queue: the file that describes a job, and how a job is submitted, followed and ended."""
