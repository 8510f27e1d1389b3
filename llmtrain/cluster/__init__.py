"""The hosts of a job, and its launch. No torch here."""
