"""What needs the standard library alone: errors, the log, units, files, redaction, untrusted text."""
