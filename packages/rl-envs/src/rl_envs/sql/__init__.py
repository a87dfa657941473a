"""Questions that a query of a SQLite database answers."""
