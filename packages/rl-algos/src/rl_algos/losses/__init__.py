"""Losses as torch-free descriptions; each names its implementation in `rl_algos.torch`."""
