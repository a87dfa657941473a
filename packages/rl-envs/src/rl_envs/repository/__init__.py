"""Repositories that an agent changes in a sandbox, scored by their tests."""
