"""The PyTorch twin of minigpt_jax: the same rooms by the same names, eager, written to be read."""
