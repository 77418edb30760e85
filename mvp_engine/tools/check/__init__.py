"""`mvp check`: a dry run of a config before it costs hours."""
