"""From a resolved run: what is wrong with its model, and this rank's module."""
