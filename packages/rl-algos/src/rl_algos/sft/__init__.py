"""Supervised fine-tuning on conversations, with the loss on what the assistant says."""
