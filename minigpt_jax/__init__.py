"""A small-GPT training system in JAX. Importing the package loads no framework."""

__version__ = "0.1.0"
