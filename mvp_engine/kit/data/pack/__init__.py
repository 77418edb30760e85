"""Packs of rows: costs, the plan of an epoch, loaders."""
