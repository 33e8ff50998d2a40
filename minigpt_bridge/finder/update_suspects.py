"""Wrong variants of the parts of an update, each with its description, to name the cause of a divergence.

Trees of arrays are flat here: one array for each parameter, by its path. As in `suspects`, numbers that a mistake
could have put in are estimated from PyTorch's result and rounded to six digits.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

import numpy as np

from minigpt_bridge.bounds import relative_error
from minigpt_bridge.finder.divergence import UPDATE, only
from minigpt_bridge.finder.suspects import rounded
from minigpt_jax.config import Schedule, TrainConfig
from minigpt_jax.formats.names import flatten
from minigpt_jax.schedule import learning_rate_at

Arrays = dict[str, np.ndarray]
Suspect = tuple[str, Arrays]


class UpdateCase(NamedTuple):
    """One micro-batch of training on both sides, from the same state."""

    train: TrainConfig
    total_updates: int
    before: dict[str, Any]
    """The two trees of a checkpoint (minigpt_jax/formats/checkpoints.py), NumPy: where both sides started."""
    after: dict[str, Any]
    """JAX's trees after the micro-batch."""
    theirs: dict[str, Any]
    """PyTorch's."""
    rate: float
    """JAX's learning rate."""
    gradients: Arrays
    """The micro-batch's own, not divided; JAX's."""
    mean: Arrays
    """The window's, over its tokens."""
    clipped: Arrays
    """... after clipping."""

    @property
    def updates(self) -> int:
        """Updates finished before this micro-batch."""
        return int(self.before["optimizer"]["updates"])

    def slot(self, when: str, name: str) -> Arrays:
        """A slot of the optimizer, or the parameters, of `before`, `after` or `theirs`."""
        trees = getattr(self, when)
        return flatten(trees["parameters"] if name == "parameters" else trees["optimizer"][name])

    def decay_of(self, name: str) -> float:
        """The weight decay that a parameter should have."""
        return self.train.weight_decay if self.clipped[name].ndim >= 2 else 0.0


def difference(ours: Arrays, theirs: Arrays) -> float:
    """The largest relative error of any array."""
    return max(relative_error(array, theirs.get(name, np.zeros(0))) for name, array in ours.items())


def fitting(suspects: Iterator[Suspect], theirs: Arrays) -> list[str]:
    """The descriptions of the variants that give `theirs`."""
    with np.errstate(all="ignore"):
        return [text for text, result in suspects if difference(result, theirs) <= UPDATE]


def _dot(first: Arrays, second: Arrays) -> float:
    return float(sum(np.vdot(array, second[name]) for name, array in first.items()))


def _mapped(function: Callable[..., Any], *trees: Arrays) -> Arrays:
    return {name: np.asarray(function(*(tree[name] for tree in trees))) for name in trees[0]}


# --- Window ---


def accumulation_cause(case: UpdateCase) -> str:
    """Why the sums of an unfinished window differ."""
    start, own = case.slot("before", "gradient_sums"), case.gradients
    tokens = float(case.after["optimizer"]["token_sum"]) - float(case.before["optimizer"]["token_sum"])

    def suspects() -> Iterator[Suspect]:
        yield "a micro-batch's gradient replaces the sum instead of being added", own
        steps = case.train.accumulation_steps
        if steps > 1:
            yield "micro-gradients are averaged instead of summed", _mapped(lambda a, b: a + b / steps, start, own)
        yield "each gradient is divided by its own tokens", _mapped(lambda a, b: a + b / tokens, start, own)

    return only(fitting(suspects(), case.slot("theirs", "gradient_sums")))


def mean_cause(case: UpdateCase, norm: float) -> str:
    """Why the window's mean gradient differs; `norm` is PyTorch's before clipping."""
    tokens = float(case.before["optimizer"]["token_sum"]) + _own_tokens(case)
    right = _dot(case.mean, case.mean) ** 0.5
    alone = _dot(case.gradients, case.gradients) ** 0.5

    def suspects() -> Iterator[tuple[str, float]]:
        divisor = rounded(tokens * right / norm) if norm else 0.0
        if divisor == 1:
            yield "the gradient sum is not divided by its tokens", tokens * right
        elif divisor:
            yield f"the gradient sum is divided by {divisor:g} instead of {tokens:g}", tokens * right / divisor
        yield "only the window's last micro-batch counts", alone / tokens
        yield "only the window's last micro-batch counts", alone / max(_own_tokens(case), 1)

    return only(text for text, value in suspects() if relative_error(value, norm) <= UPDATE)


def _own_tokens(case: UpdateCase) -> float:
    """Supervised tokens of the micro-batch that ends the window: from the sum and the mean."""
    sums, mean = case.slot("before", "gradient_sums"), case.mean
    total = _mapped(np.add, sums, case.gradients)
    return round(_dot(total, mean) / _dot(mean, mean)) - float(case.before["optimizer"]["token_sum"])


# --- Clipping ---


def clip_cause(case: UpdateCase, norm: float, theirs: Arrays) -> str:
    """Why clipping JAX's mean gradient gives PyTorch another result."""
    mean, limit = case.mean, case.train.grad_clip
    right = _dot(mean, mean) ** 0.5
    scale = _dot(theirs, mean) / right**2
    if relative_error(right, norm) > UPDATE:
        sizes = {
            "the largest element": max(float(np.abs(array).max()) for array in mean.values()),
            "the sum of absolute values": sum(float(np.abs(array).sum()) for array in mean.values()),
            "the sum of the parameters' norms": sum(float(np.linalg.norm(array)) for array in mean.values()),
            "the square of the global norm": right**2,
        }
        return only(f"the norm is {text}" for text, size in sizes.items() if relative_error(size, norm) <= UPDATE)

    def suspects() -> Iterator[Suspect]:
        yield "the gradient is not clipped", mean
        eps, other = rounded(limit / scale - right), rounded(scale * (right + 1e-6))
        if abs(eps) < 1e-12:
            yield "clipping leaves out the eps of 1e-6 beside the norm", _mapped(lambda g: g * (limit / right), mean)
        elif eps != 1e-6:
            yield (
                f"clipping adds {eps:g} to the norm instead of 1e-6",
                _mapped(lambda g: g * limit / (right + eps), mean),
            )
        if other != limit:
            yield (
                f"the largest norm is {other:g} instead of {limit:g}",
                _mapped(lambda g: g * other / (right + 1e-6), mean),
            )
        yield "every parameter is clipped by its own norm", _mapped(_clipped_alone, mean)
        if any(np.abs(array).max() > limit for array in mean.values()):
            yield "elements are clipped instead of the norm", _mapped(lambda g: np.clip(g, -limit, limit), mean)
        yield "the gradient is scaled up to the largest norm", _mapped(lambda g: g * limit / (right + 1e-6), mean)

    def _clipped_alone(gradient: np.ndarray) -> np.ndarray:
        return gradient * min(1, limit / (float(np.linalg.norm(gradient)) + 1e-6))

    return only(fitting(suspects(), theirs))


# --- Learning rate ---


def rate_cause(case: UpdateCase, theirs: float, rate_of: Callable[[int], float]) -> str:
    """Why the learning rate differs.

    Args:
        case: the update.
        theirs: the rate that the optimizer was given.
        rate_of: the PyTorch side's own function of the number of finished updates. Where it gives `theirs`, a suspect
            must give the same at every other update too: at a single one, several suspects are alike.
    """
    counts = list(range(min(case.total_updates, 1000)))
    if case.updates not in counts or relative_error(rate_of(case.updates), theirs) > UPDATE:
        counts = [case.updates]
        found = np.array([theirs])
    else:
        found = np.array([rate_of(count) for count in counts])

    def fits(schedule: Callable[[int], float]) -> bool:
        return relative_error(np.array([schedule(count) for count in counts]), found) <= UPDATE

    own = [text for text, schedule in _schedules(case) if fits(schedule)]
    factor = rounded(theirs / case.rate) if case.rate else 0.0
    right = _schedule(case)
    scaled = [f"the rate is multiplied by {factor:g}"] if fits(lambda count: factor * right(count)) else []
    return only(own or scaled)


def _schedule(case: UpdateCase, **changes: Any) -> Callable[[float], float]:
    config = dataclasses.replace(case.train, **changes)
    scale = float(case.before["optimizer"]["learning_rate_scale"])
    return lambda count: scale * float(learning_rate_at(np.float64(count), config, total_updates=case.total_updates))


def _schedules(case: UpdateCase) -> Iterator[tuple[str, Callable[[int], float]]]:
    train, right = case.train, _schedule(case)
    peak, warmup = right(train.warmup_steps or 0), train.warmup_steps or 0
    yield "the schedule is one update late", lambda count: right(count - 1)
    yield "the schedule is one update late", lambda count: right(max(count - 1, 0))
    yield "the schedule is one update early", lambda count: right(count + 1)
    if train.accumulation_steps > 1:
        every = train.accumulation_steps
        yield "the schedule counts micro-batches", lambda count: right(count * every)
        yield "the schedule counts micro-batches", lambda count: right(count * every + every - 1)
    if warmup:
        yield (
            "the warm-up starts from a rate of 0",
            lambda count: peak * count / warmup if count < warmup else right(count),
        )
        yield "there is no warm-up", _schedule(case, warmup_steps=0)
    yield "the rate is the peak throughout", lambda count: peak
    for kind in get_args(Schedule):
        if kind != train.schedule:
            yield f"the schedule is {kind} instead of {train.schedule}", _schedule(case, schedule=kind)


# --- AdamW ---


def moment_cause(case: UpdateCase, name: str) -> str:
    """Why a moment differs; `name` is first_moment or second_moment."""
    power, beta = (1, case.train.beta1) if name == "first_moment" else (2, case.train.beta2)
    old, theirs = case.slot("before", name), case.slot("theirs", name)
    new = _mapped(lambda gradient: gradient**power, case.clipped)

    def suspects() -> Iterator[Suspect]:
        apart = _mapped(np.subtract, old, new)
        other = rounded(_dot(_mapped(np.subtract, theirs, new), apart) / _dot(apart, apart))
        if other != beta:
            text = f"beta{power} is {other:g} instead of {beta:g}"
            yield text, _mapped(lambda a, b: other * a + (1 - other) * b, old, new)
        yield f"the gradient is added without the factor 1 - beta{power}", _mapped(lambda a, b: beta * a + b, old, new)
        parameters = case.slot("before", "parameters")
        coupled = {n: (g + case.decay_of(n) * parameters[n]) ** power for n, g in case.clipped.items()}
        yield "weight decay is added to the gradient", _mapped(lambda a, b: beta * a + (1 - beta) * b, old, coupled)

    return only(fitting(suspects(), theirs))


def decay_cause(case: UpdateCase) -> str | None:
    """The mistake in the weight decay that explains the new parameters; None when there is no such."""
    old, ours, theirs = (case.slot(when, "parameters") for when in ("before", "after", "theirs"))
    if not case.rate:
        return None
    found, explained = {}, {}
    for name, parameter in old.items():
        right, error = case.decay_of(name), theirs[name] - ours[name]
        estimate = right - float(np.vdot(error, parameter) / np.vdot(parameter, parameter)) / case.rate
        found[name] = rounded(estimate) if abs(estimate) > 1e-9 else 0.0
        if relative_error(ours[name], theirs[name]) <= UPDATE:
            found[name] = right
        explained[name] = ours[name] - case.rate * (found[name] - right) * parameter
    if difference(explained, theirs) <= UPDATE:
        return _describe_decay(case, {name: value for name, value in found.items() if value != case.decay_of(name)})
    steps = {n: parameter * (1 - case.rate * case.decay_of(n)) - ours[n] for n, parameter in old.items()}
    after = {n: (parameter - steps[n]) * (1 - case.rate * case.decay_of(n)) for n, parameter in old.items()}
    return "weight decay is applied after the step" if difference(after, theirs) <= UPDATE else None


def _describe_decay(case: UpdateCase, wrong: dict[str, float]) -> str | None:
    right, matrices = case.train.weight_decay, {name for name, leaf in case.clipped.items() if leaf.ndim >= 2}
    if len(set(wrong.values())) != 1:
        return None
    value = next(iter(wrong.values()))
    if wrong.keys() == matrices:
        if relative_error(value, right / case.rate) <= 1e-5:
            return "weight decay is not multiplied by the learning rate"
        return f"weight decay is {value:g} instead of {right:g}" if value else "there is no weight decay"
    if value == right and wrong.keys() == case.clipped.keys() - matrices:
        return "weight decay acts on norm weights as well"
    names = ", ".join(wrong) if len(wrong) <= 3 else f"{len(wrong)} parameters"
    return f"weight decay of {names} is {value:g} instead of {right if wrong.keys() <= matrices else 0:g}"


def parameter_cause(case: UpdateCase) -> str:
    """Why the new parameters differ although decay and moments are right."""
    old, theirs, train = case.slot("before", "parameters"), case.slot("theirs", "parameters"), case.train
    first, second = case.slot("after", "first_moment"), case.slot("after", "second_moment")
    kept = {name: parameter * (1 - case.rate * case.decay_of(name)) for name, parameter in old.items()}
    count = case.updates + 1

    def moved(n1: float, n2: float, eps: float = train.adam_eps, inside: float = 0.0, sign: float = 1.0) -> Arrays:
        """The update with moments divided by 1 - beta^n; n infinite for no correction."""
        hat1, hat2 = 1 - train.beta1**n1, 1 - train.beta2**n2
        step = _mapped(lambda m, v: m / hat1 / (np.sqrt(v / hat2 + inside) + eps), first, second)
        return _mapped(lambda p, s: p - sign * case.rate * s, kept, step)

    def suspects() -> Iterator[Suspect]:
        yield "the parameters are not moved", old
        yield "the step is taken in the gradient's direction", moved(count, count, sign=-1)
        yield "neither moment is corrected for its bias", moved(np.inf, np.inf)
        yield "the first moment is not corrected for its bias", moved(np.inf, count)
        yield "the second moment is not corrected for its bias", moved(count, np.inf)
        yield "the bias correction is one update ahead", moved(count + 1, count + 1)
        yield "eps is inside the root", moved(count, count, eps=0.0, inside=train.adam_eps)
        hat1, hat2 = 1 - train.beta1**count, 1 - train.beta2**count
        guesses = [case.rate * first[n] / hat1 / (kept[n] - theirs[n]) - np.sqrt(second[n] / hat2) for n in old]
        eps = rounded(float(np.nanmedian(np.concatenate([guess.ravel() for guess in guesses]))))
        if eps != train.adam_eps:
            yield f"AdamW's eps is {eps:g} instead of {train.adam_eps:g}", moved(count, count, eps=eps)

    return only(fitting(suspects(), theirs))
