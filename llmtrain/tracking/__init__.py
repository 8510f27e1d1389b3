"""Metrics, events, Weights & Biases, and the report of a run. Import the modules; this package loads none."""
