"""Workloads: who asks what, and when. The same ones are played against the virtual engine and against live servers."""
