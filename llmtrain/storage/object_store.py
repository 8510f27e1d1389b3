"""Folders in object stores, by URL: s3://, gs://, az://, hf:// and all that fsspec has a driver for."""

from __future__ import annotations

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""Protocol -> the extra of llmtrain that brings its driver."""


def problem_of(url: str) -> tuple[str, str] | None:
    """(rule, remedy) for a URL that cannot be a mirror; None: it can. Nothing is asked of the network."""
    import fsspec

    protocol, sign, rest = url.partition("://")
    if not sign or not rest or protocol not in fsspec.available_protocols():
        return "is no URL of a store", "write PROTOCOL://BUCKET/FOLDER, such as s3://bucket/runs/name"
    if "@" in rest.partition("/")[0]:
        return "has a user or a password in it", "leave them to the store's own settings (such as AWS_PROFILE)"
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        return f"needs a driver for {protocol}", f"pip install 'llmtrain[{_EXTRAS.get(protocol, protocol)}]'"
    return None
