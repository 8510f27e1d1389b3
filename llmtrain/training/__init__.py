"""One run: its setup, its loop and its parts."""
