"""Reads from a model's hidden states: logprobs, entropy, top-k, scores and values."""
