"""Games of the gymnasium package that can be played in text, with generated starts."""
