"""Weights between Hugging Face's names and shapes and Megatron's, tensor by tensor."""
