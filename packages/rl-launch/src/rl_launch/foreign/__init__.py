"""Configs of other systems, imported as recipes."""
