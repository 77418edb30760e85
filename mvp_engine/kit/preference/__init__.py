"""Losses that compare answers or models, with their engines: preferences, reward models, distillation, contrast."""
