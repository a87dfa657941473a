"""A training step on a model: weights, gradients, optimizer and its state."""
