"""Programs: a response is run in a sandbox and scored by its tests."""
