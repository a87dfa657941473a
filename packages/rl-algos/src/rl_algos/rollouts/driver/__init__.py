"""The rollouts of a run in its driver: unfinished, finished, saved and taken."""
