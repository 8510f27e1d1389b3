"""Modules that need the standard library alone: errors, the log, units, files, redaction, untrusted text."""
