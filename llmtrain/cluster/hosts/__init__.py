"""Hosts of a job: their names, ssh to them, the environment that arrives there."""
