"""What every training backend shares."""
