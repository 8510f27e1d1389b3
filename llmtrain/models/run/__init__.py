"""Builds this rank's module of a resolved run's model, and refuses unfit models."""
