"""Ray, its nodes and their preparation."""
