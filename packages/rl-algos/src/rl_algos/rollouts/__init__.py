"""From prompts to rollouts: programs, the worker that runs them beside a replica, and the sources a loop collects
from.
"""
