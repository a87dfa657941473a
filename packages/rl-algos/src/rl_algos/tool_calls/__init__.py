"""Tool calls in the text of a turn, by the format that the model writes them in."""
