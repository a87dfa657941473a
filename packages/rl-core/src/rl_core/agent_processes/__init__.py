"""Processes of agents: one for each rollout, forked from one that has imported the agent's function."""
