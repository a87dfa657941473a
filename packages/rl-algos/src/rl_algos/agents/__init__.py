"""Agents: programs that speak to a language model's HTTP interface, rolled out as they are."""
