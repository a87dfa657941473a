"""Text that must equal, contain or match a row's answer, and JSON that must satisfy its schema."""
