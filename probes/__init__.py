"""The probes that rdiag ships: one file each, and what several share in :mod:`probes.lib`."""
