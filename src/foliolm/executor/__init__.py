"""Executors: they run plans."""
