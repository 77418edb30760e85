"""Weights from and to Hugging Face folders and the Hub: load, export, merge, and streams of full tensors."""
