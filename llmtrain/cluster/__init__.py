"""The hosts of a job: its launch, its watch. No torch here."""
