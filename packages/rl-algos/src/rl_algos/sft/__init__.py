"""Supervised fine-tuning on conversations, with the loss on the assistant's text."""
