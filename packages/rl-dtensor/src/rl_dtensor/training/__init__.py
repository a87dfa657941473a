"""A training step on a model: gradients, optimizer, pipeline, state and where it resides."""
