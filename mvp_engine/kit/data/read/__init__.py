"""Reading of rows as users have them: files and streams, row formats, media probing and decoding."""
