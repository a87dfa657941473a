"""Folders and files of models: found, distinguished and checked before anything starts."""
