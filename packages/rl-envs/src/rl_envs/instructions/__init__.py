"""Instructions whose fulfilment a program can check."""
