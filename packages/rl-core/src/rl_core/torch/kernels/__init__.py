"""Fused layers: Triton kernels on GPUs, and the plain formulas elsewhere."""
