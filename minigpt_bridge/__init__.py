"""Where both frameworks meet: models in any format, engines by name, and the proof that the two are the same.

Neither minigpt_jax nor minigpt_torch imports this package; scripts and parity tests do.
"""
