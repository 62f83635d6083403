"""Code that several probes share; on the host it is imported inside ``run``, as ``probes.lib``."""
