"""Repositories on the Hugging Face Hub: names, what this host's cache has of them, fetching, publishing."""
