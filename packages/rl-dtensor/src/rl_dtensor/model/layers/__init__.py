"""Changes to the computation of a model's layers."""
