"""The config of a run: read, checked and recorded."""
