"""Process groups and what is done within them."""
