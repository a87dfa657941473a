"""Tasks of the reasoning-gym package, with datasets that are generated on the spot."""
