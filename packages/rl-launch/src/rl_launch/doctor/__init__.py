"""`rl doctor`: checks of a machine against the needs of a recipe."""
