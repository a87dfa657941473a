"""Traces of production and chat logs as rows."""
