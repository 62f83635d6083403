"""Servers of language models: asking them, reading what they count, and loading them a little."""
