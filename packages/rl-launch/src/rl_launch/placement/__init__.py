"""The devices of a run, and their current holders."""
