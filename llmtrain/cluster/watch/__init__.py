"""During a run: each rank leaves a heartbeat, and an agent process on each host reads it."""
