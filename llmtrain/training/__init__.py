"""One run: its setup, its loop and what takes part beside the step."""
