"""Environments of others behind a server that the user starts: OpenEnv and NeMo Gym."""
