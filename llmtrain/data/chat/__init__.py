"""Conversations: their messages, the chat template that renders them, and the tokens that count for the loss."""
