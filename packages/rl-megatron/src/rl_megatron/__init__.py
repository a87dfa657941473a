"""Training on Megatron Core."""
