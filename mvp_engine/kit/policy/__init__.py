"""Losses and advantages of policy optimization on packed batches."""
