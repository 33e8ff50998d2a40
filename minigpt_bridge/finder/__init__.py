"""The first place where PyTorch computes something else than JAX, and why: `search.find_divergence`."""
