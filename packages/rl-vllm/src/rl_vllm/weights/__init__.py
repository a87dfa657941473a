"""Weights and adapters that a running engine takes over."""
