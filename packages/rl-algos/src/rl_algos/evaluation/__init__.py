"""Evaluation: estimates of how well a model answers prompts, their uncertainty, and comparison of two models."""
