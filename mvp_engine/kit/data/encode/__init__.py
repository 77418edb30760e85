"""Encoding of rows: token ids, loss masks and media tensors, by the model's chat template and processor."""
