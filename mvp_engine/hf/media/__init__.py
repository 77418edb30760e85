"""Encoders of images, video and audio without host syncs, and their features in place of placeholder tokens."""
