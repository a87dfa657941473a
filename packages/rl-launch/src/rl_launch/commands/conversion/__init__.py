"""`rl convert`: checkpoints of training backends, adapters and Hugging Face files, converted into one another."""
