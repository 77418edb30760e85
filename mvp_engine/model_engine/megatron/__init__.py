"""The Megatron-Core backend: decoder layers of Hugging Face models computed by Megatron's TransformerLayer.

Parameters stay those of the Hugging Face model, under its names. `WeightTable` joins them to Megatron's weights in
each forward, so sharding, optimizers, checkpoints, exports and weight streams are those of the FSDP backend. Only
`modules.py` imports megatron.
"""
