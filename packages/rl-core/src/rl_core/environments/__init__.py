"""Environments in their own processes: settings, the pool, and the process that it talks to."""
