"""Spans of all processes of a run as Chrome traces, a file for each range of steps."""
