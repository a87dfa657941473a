"""Finished rollouts as rows to train on: batches, segments, rewards and statistics."""
