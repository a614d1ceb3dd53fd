"""The executor that runs a model with PyTorch."""
