"""The costs of a computation, counted on tensors without data: kernels, memory traffic, waits, collectives, memory."""
