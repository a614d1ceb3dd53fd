"""Decoder-only transformers as lists of layers, in plain PyTorch."""
