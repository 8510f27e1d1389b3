"""From facts of a job that does not go on to one paragraph that says why. Nothing is asked or written here."""
