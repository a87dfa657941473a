"""Configs of other systems: what their keys are here, as data, for `rl config import` and for messages about unknown
keys."""
