"""The commands of the command line, callable from Python."""
