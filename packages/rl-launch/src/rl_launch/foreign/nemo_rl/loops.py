"""Algorithms by what they do."""

ROLLOUTS = ("grpo", "ppo", "distillation")
"""Algorithms that train on their own rollouts."""
