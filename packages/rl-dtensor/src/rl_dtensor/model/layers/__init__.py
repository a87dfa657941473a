"""Changes of what the layers of a model compute."""
