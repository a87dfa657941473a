"""Puts this folder on the path: the cases that ranks run are shared by the folders below."""
