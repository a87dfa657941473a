"""The order in which rows are drawn."""
