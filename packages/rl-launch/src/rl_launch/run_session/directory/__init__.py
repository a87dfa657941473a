"""The directory of a run: its layout, lock, state and branches, written once and read by anyone."""
