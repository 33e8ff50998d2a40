"""Muon: momentum whose matrix is made nearly orthogonal before it becomes an update (Jordan et al., 2024).

It follows `optax.contrib.muon`, which the twin uses, and not `torch.optim.Muon`, which makes the matrix orthogonal in
bfloat16 and starts the momentum without bias correction: what is compared in float64 has to be computed in it.

m rows  n columns of a matrix
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, (x x') x and (x x')^2 x: they bring every singular value near 1 in few steps, not to 1 in many."""
EPS = 1e-8
"""Added to the norm that a matrix is divided by."""
CONSISTENT_RMS = 0.2
"""Root mean square of an update, about that of AdamW's."""


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; its slots have AdamW's names.

    Args:
        matrices: [m, n] parameters, all of them.
        weight_decay: times the learning rate, off every update.
    """

    def __init__(self, matrices: Iterable[Tensor], *, weight_decay: float):
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update of every matrix by its gradient; `closure`, which torch's optimizers take, is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter]
                step = slots.get("step", torch.zeros(())) + 1
                moment = MOMENTUM * slots.get("exp_avg", torch.zeros_like(parameter)) + (1 - MOMENTUM) * parameter.grad
                slots |= {"step": step, "exp_avg": moment}
                # Nesterov looks one update ahead, and so does the bias correction of what it takes from there.
                ahead = MOMENTUM * moment / (1 - MOMENTUM ** (step.item() + 1))
                now = (1 - MOMENTUM) * parameter.grad / (1 - MOMENTUM ** step.item())
                size = CONSISTENT_RMS * max(parameter.shape) ** 0.5
                update = size * orthogonal(ahead + now) + group["weight_decay"] * parameter
                parameter.add_(update, alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix [m, n] with most singular values near 1 (0.7 to 1.2), by Newton-Schulz iterations in its own dtype."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (torch.linalg.matrix_norm(x) + EPS)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = linear * x + (cubic * gram + quintic * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
