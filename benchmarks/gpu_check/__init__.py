"""The sections of `benchmarks/gpu_check.py`, and how they are run and reported."""
