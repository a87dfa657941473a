"""Games of several turns, with generated starts: a sliding puzzle, guessing of a number, and games of two agents."""
