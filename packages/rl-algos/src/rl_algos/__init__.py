"""Post-training algorithms: losses, advantages, data and rollout logic, and the loops."""
