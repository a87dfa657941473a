"""Preference data as rows and batches, for every algorithm that learns from comparisons or verdicts."""
