"""Rollouts, and the protocols of those that make them: generator, environment, program, pool and source."""
