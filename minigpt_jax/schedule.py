"""The learning rate as a function of the update count: one formula for every framework.

Framework-free: the caller passes the array library that computes it.

With u the number of updates already done, W the warm-up and N the length of the run:

    warm-up      u < W      peak * (u + 1) / (W + 1)
    cosine       u >= W     floor + (peak - floor) * (1 + cos(pi * p)) / 2,   p = (u - W) / (N - W)
    wsd          u >= W     peak until the last fifth of the run, then linear to the floor
    constant     u >= W     peak
    minimind     u >= W     floor + peak * (1 + cos(pi * p)) / 2,   p = ((u + 1) * K - 1) / (N * K), whatever W is

so the first update already moves, update W is the first at the peak, and the floor (peak * min_lr_ratio) is reached
at u = N, one past the last update. Past N the rate stays at the floor. The last line is what the released MiniMind
does: its cosine stands on the floor, so a rate begins at 1.1 times the peak, and it goes by micro-batches, K of them an
update, of which the last one's rate is used.
"""

import math
from types import ModuleType
from typing import Any

import numpy as np

from minigpt_jax.config import TrainConfig

WSD_DECAY_FRACTION = 0.2
"""Part of the run over which the wsd schedule falls."""


def learning_rate_at(count: Any, config: TrainConfig, *, total_updates: int, numpy: ModuleType = np) -> Any:
    """The learning rate of the update that follows `count` finished ones.

    Args:
        count: number of finished updates; an int or an array.
        config: `learning_rate` and `warmup_steps` are set.
        total_updates: length of the run in updates, at least 1.
        numpy: NumPy, or a library with its interface (jax.numpy).
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    assert peak is not None
    assert warmup is not None
    floor = peak * config.min_lr_ratio
    if config.schedule == "cosine":
        progress = numpy.clip((count - warmup) / max(total_updates - warmup, 1), 0, 1)
        decayed = floor + (peak - floor) * (1 + numpy.cos(math.pi * progress)) / 2
    elif config.schedule == "minimind":
        each = config.accumulation_steps
        progress = numpy.clip(((count + 1) * each - 1) / (total_updates * each), 0, 1)
        decayed = floor + peak * (1 + numpy.cos(math.pi * progress)) / 2
    elif config.schedule == "wsd":
        decay_updates = max(round(WSD_DECAY_FRACTION * total_updates), 1)
        progress = numpy.clip((count - (total_updates - decay_updates)) / decay_updates, 0, 1)
        decayed = peak + (floor - peak) * progress
    else:
        decayed = peak
    return numpy.where(count < warmup, peak * (count + 1) / (warmup + 1), decayed)
