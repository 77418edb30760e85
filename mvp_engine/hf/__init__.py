"""Hugging Face models on packed batches: wrappers, loading, export, adapters.

This is the only package that imports transformers' internals.
"""
