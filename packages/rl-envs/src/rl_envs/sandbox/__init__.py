"""A sandbox for programs that a policy wrote: processes without network, files or privileges, with limits."""
