"""From a row to token ids, labels and media tensors, by the chat template and the processor of the model."""
