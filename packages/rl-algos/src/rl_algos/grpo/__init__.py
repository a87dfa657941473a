"""Group relative policy optimization and its family."""
