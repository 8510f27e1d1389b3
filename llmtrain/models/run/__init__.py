"""A resolved run's model: the refusals, and this rank's module."""
