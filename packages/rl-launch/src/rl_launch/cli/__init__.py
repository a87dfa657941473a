"""The command line, `rl`."""

from rl_launch.cli.app import app, main

__all__ = ["app", "main"]
