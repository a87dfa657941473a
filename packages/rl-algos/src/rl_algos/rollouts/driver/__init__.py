"""The rollouts of a run as its driver sees them: which are under way, finished, saved and taken."""
