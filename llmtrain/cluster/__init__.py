"""The hosts of a job: checks before a run, its launch, its watch. No torch here."""
