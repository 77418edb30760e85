"""Mixture-of-experts layers: GEMMs, balance, expert parallel, and FP8."""
