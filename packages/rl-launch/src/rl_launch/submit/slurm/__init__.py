"""Slurm: a batch script that runs Ray over its nodes, and continues the run until it is finished."""
