"""Several hosts: before a run, during it and after it. No torch here."""
