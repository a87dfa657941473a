"""Files of rollouts."""
