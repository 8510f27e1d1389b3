"""A run's data: makes sequences from shards, in an order that is computed, and batches for each rank."""
