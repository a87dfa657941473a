"""The wire formats that agents speak."""
