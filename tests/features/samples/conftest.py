"""Tokenizers with a token before each text, of other tests."""

from tests.unit.data.test_first_tokens import root

__all__ = ["root"]
