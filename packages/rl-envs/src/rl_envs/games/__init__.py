"""Games of several turns, with generated starts: a sliding puzzle, and guessing of a number."""
