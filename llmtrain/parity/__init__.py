"""Proof that the user's own DeepSpeed JSON trains as plain PyTorch does in one process."""
