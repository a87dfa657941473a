"""Tensor code that every training backend shares: packed rows, chunked logprobs, losses, weight transports."""
