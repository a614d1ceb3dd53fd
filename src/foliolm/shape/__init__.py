"""What a model and a device are."""
