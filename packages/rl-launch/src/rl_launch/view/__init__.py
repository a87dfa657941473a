"""`rl view`: runs, evaluations and files of rollouts as a local web page, read from files only."""
