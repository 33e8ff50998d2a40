"""How fast both frameworks are, measured side by side in one process: scripts/bench.py."""
