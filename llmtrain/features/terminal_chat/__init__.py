"""A conversation with a trained model in the terminal."""

from __future__ import annotations

from llmtrain.features import Feature


class TerminalChat(Feature):
    commands = (("chat", "llmtrain.features.terminal_chat.command", "talk with a trained model in the terminal"),)


FEATURE = TerminalChat()
