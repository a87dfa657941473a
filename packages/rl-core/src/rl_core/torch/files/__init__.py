"""A model's files on disk."""
