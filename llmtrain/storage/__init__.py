"""Pieces of tensors, tensor files, and the Hub."""
