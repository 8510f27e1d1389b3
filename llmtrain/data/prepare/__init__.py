"""The work of `llmtrain prepare`: several processes turn text files into shards of tokens."""
