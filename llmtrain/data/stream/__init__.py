"""A run's data: shards become sequences, in a computed order, and batches for each rank."""
