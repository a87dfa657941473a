"""Runs from Python, as `rl_launch` exports them."""
