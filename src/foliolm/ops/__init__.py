"""Tensor operations behind small interfaces: linear layers, norms, rotary embedding, KV writes, attention."""
