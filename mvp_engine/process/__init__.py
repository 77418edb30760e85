"""Process-level helpers: stop signals and broken pipes."""
