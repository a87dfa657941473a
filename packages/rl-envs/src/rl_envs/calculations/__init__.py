"""Generated products, to be computed by a calculator or a program rather than by the model."""
