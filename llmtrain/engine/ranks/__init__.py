"""The ranks of a run: how they meet and agree, their device, their network interface."""
