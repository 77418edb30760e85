"""Processes: signals, broken pipes."""
