"""The half of the check that needs torch."""
