"""Implementations of the losses, resolved inside model workers."""
