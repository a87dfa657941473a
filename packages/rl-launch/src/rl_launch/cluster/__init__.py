"""Ray, its nodes and what is prepared on them."""
