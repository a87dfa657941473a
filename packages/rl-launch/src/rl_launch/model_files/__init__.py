"""Folders and files of models: found, told apart and checked before anything starts."""
