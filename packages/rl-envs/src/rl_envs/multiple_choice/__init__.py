"""Multiple choice: the letter of an option in a response."""
