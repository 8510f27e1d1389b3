"""Training data: `prepare` makes shards of text, `chat` rows of conversations, `stream` batches of shards."""
