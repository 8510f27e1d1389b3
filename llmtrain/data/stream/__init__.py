"""A run reads its data here: shards become sequences, in an order that is computed, and batches for each rank."""
