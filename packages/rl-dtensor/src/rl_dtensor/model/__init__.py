"""The model on its ranks: built, loaded, laid out and named."""
