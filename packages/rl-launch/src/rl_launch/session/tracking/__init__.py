"""What a run reports while it goes on: progress, logs and metrics."""
