"""The work of `llmtrain prepare`: text files become shards of tokens, in several processes."""
