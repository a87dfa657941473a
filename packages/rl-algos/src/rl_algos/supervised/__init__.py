"""Learning from given rows: the loop that supervised fine-tuning, preference learning and reward models share."""
