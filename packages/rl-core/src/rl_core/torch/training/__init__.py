"""The skeleton that every training backend shares."""
