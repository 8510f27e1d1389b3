"""The ranks of a run: how they meet and agree, their devices and network interfaces."""
