"""A run on several hosts: start it, watch how it ends, start it again after a fault."""
