"""Weights and the one decoder: a model's spec becomes a list of operations over buffers."""
