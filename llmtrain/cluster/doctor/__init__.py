"""Before a run: facts of each host, the faults among them, the network between the hosts."""
