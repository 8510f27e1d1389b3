"""Explains in one paragraph why a job does not go on, from its facts. Nothing is asked or written here."""
