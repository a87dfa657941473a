"""The objective that every policy-gradient algorithm minimises: its loss, settings and statistics."""
