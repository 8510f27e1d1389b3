"""Training data: `prepare` makes shards from text, `chat` rows from conversations, `stream` batches from shards."""
