"""The model on packed batches: `PackedModel` and `LanguageModel`, attention, preflight, and layouts.

Model engines call it through `HFAdapter`; kits subclass `PackedModel`.
"""
