"""Tasks of the reasoning-gym package, with generated datasets."""
