"""What the tools around a GPU say, read without trusting it."""
