"""What surrounds a training or a server on a host: settings, software, limits."""
