"""Reports of a run in progress: progress, logs and metrics."""
