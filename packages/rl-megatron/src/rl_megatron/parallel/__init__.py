"""Process groups of a model, and operations within them."""
