"""Columns of rows of any length, and how they are split and shuffled."""
