"""During a run: each rank says what it does, and a small process on each host reads it."""
