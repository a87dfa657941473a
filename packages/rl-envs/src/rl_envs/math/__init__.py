"""Mathematics: comparison of a completion's final answer with the known one."""
