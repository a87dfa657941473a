"""Mathematics: a completion's final answer against the one that is known."""
