"""What generators that run a model in their own process share: rows, sampling, the engine's thread and the facade."""
