"""Calls to the kernel that confine a process."""
