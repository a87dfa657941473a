"""Callbacks of users."""
