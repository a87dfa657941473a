"""What the command line does, callable from Python."""
