"""Numeric formats of few bits: values, scales, and the error that rounding may make."""
