"""Repositories on the Hugging Face Hub: names, this host's cache, downloading, publishing."""
