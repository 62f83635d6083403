"""Collective communication: timings, their meaning, and what others measured."""
