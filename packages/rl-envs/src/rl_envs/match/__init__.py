"""Text that must equal, contain or match what a row says, and JSON that must satisfy its schema."""
