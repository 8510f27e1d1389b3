"""A cluster on one machine: hosts are namespaces with an sshd each, joined by a switch in user space (README.md)."""
