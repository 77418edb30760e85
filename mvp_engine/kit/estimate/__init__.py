"""Estimates of memory and step time from a model on the meta device, and the sizes that `auto` chooses by them.

`mvp estimate` and `mvp plan` print them; an engine chooses `mllm.micro_batch_tokens=auto` with the same numbers.
"""
