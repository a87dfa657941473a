"""From prompts to rollouts: programs, the worker that runs them next to a replica, and the sources a loop collects
from.
"""
