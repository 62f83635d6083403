"""The command line: parse, call, print. One small module per command."""
