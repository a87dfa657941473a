"""Triton programs; imported only when they run, because importing Triton takes time and needs the package."""
