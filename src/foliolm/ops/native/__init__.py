"""Kernels in C++ for the CPU, without PyTorch: compiled once for this machine, called through ctypes."""
