"""`rl env check` and `rl env run`: environments tried on rows of data, without a run."""
