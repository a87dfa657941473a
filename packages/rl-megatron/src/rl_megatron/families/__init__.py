"""Model families: their architecture in Megatron's terms, and their weights."""
