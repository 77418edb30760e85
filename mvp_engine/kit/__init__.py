"""Kits: small suites of calls that recipes use as they like."""
