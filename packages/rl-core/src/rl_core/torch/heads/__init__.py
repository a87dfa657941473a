"""What is read from a model's hidden states."""
