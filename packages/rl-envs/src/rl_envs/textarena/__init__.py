"""Games of the textarena package, for one player or several, with generated starts."""
