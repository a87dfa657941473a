"""Tasksets of the verifiers package, played by its agents, whose calls the policy answers."""
