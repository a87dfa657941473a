"""Tools that a policy calls by tags in its text: a calculator, Python in a sandbox, and a search in a corpus."""
