"""Generation with a Hugging Face model in process, for machines without vLLM."""
