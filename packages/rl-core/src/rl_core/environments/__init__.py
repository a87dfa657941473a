"""Environments in processes of their own: settings, the pool, and the process that it talks to."""
