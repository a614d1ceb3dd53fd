"""Models on disk: where they lie, what their headers say, their tensors as a stream."""
