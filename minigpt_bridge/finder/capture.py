"""Look inside a PyTorch module while it runs, without changing what it computes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def input_of(module: nn.Module, run: Callable[[], Any]) -> Tensor | None:
    """What `module` is given while `run` runs (the last time, if often); None when it is not called."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        run()
    finally:
        handle.remove()
    return seen[-1] if seen else None
