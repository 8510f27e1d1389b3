"""Proof that the user's own DeepSpeed JSON trains as one process of plain PyTorch does."""
