"""Rows as users have them: files, row formats, media decoding."""
