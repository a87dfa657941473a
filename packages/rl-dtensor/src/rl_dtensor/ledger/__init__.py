"""The costs of training a model on this backend, counted without a GPU, without its weights and without other ranks."""
