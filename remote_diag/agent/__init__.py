"""The program that runs on the host: standard library only, Python 3.8 and newer.

The client imports :mod:`frames` and :mod:`layout` from here, so both ends share one definition of the wire.
"""
