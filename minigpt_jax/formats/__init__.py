"""Weights and optimizer state as files that other programs read, and back. Framework-free: everything is NumPy."""

from typing import Literal

Format = Literal["torch", "safetensors", "hf", "run"]
"""What a model can be written as: MiniMind's .pth, one .safetensors file, a Hugging Face directory, a run directory."""

AdapterFormat = Literal["peft", "torch"]
"""What an adapter can be written as: a PEFT directory, or MiniMind's .pth."""

FileDType = Literal["float32", "float16"]
"""Precision of the weights in a file; float16 as MiniMind's own."""
