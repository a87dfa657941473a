"""Reward models: a score for a response, learned from comparisons or from given scores."""
