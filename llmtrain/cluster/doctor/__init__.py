"""Before a run: what each host is like, what of it is wrong, and the network between them."""
