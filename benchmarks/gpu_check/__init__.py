"""The sections of `benchmarks/gpu_check.py`, their runner and their report."""
