"""Reports of a process about its work: spans, stacks and profiles."""
