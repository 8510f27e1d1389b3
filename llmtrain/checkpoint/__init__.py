"""Checkpoints: a run calls `save` and `load`, `format` is the contents of the disk; other files serve commands."""
