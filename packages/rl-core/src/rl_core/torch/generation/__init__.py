"""Shared by generators that run a model in their own process: rows, sampling, the engine's thread and the facade."""
