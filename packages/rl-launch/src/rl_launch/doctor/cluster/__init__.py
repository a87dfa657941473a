"""`rl doctor --cluster`: checks and measurements of the nodes of a Ray cluster before a run uses them."""
