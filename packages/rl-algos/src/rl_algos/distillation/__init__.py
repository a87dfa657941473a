"""Distillation: a student learns the distributions of teachers, on its own rollouts or on given text."""
