"""Weights and optimizer state as files that other programs read, and back. Framework-free: everything is NumPy."""
