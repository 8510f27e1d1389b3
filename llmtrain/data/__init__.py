"""Training data: `prepare` makes shards from text, `chat` rows from conversations, `stream` batches from shards.

A run enters by `stream/train_data.py` and `stream/loader.py`, the command `prepare` by `prepare/preparation.py`."""
