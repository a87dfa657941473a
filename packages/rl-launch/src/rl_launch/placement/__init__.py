"""Which devices a run takes, and who has them when."""
