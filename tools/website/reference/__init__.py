"""Pages that are generated: from schemas, parsers, docstrings, sources and results."""
