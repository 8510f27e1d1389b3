"""Builds this rank's module of a run's model, and refuses models that do not fit the run."""
