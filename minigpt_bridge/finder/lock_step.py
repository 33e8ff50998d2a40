"""One micro-batch through every operation of both sides: forward on the same inputs, backward from the same cotangent.

B batch  T time
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

from minigpt_bridge.bounds import relative_error
from minigpt_bridge.finder import recording, replay, suspects
from minigpt_bridge.finder.divergence import CAST_SHARE, GRADIENT, PART, UNKNOWN, Divergence, differing_share, only
from minigpt_bridge.finder.operations import Operation, Side, operations_of
from minigpt_bridge.finder.recording import Advanced, Recorded, Tape
from minigpt_bridge.finder.suspects import Case
from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import Parameters, flatten
from minigpt_jax.objective import BatchArrays
from minigpt_torch import objective as torch_objective
from minigpt_torch.model import Transformer
from minigpt_torch.weights import as_array


class _Run(NamedTuple):
    """One operation that both sides have run."""

    layer: int | None
    done: replay.Replay
    recorded: Recorded


@dataclass(frozen=True)
class MicroBatch:
    """What both sides are given."""

    config: ModelConfig
    twin: Transformer
    step: int
    """The update under way, counted from 1."""
    parameters: Parameters
    """JAX's, as NumPy."""
    batch: BatchArrays
    """Five [B, T] NumPy arrays."""

    def compare(self, advanced: Advanced) -> Divergence | None:
        """The first operation that differs, forward and then backward.

        Args:
            advanced: the loss and the gradients of JAX's whole model, NumPy.
        """
        side = replay.torch_side(torch_objective.batch_tensors(self.batch))
        runs: list[_Run] = []
        for layer, part, operation, recorded, tape in self._operations():
            done = replay.replay(operation, part, side, [tape[name] for name in operation.inputs])
            if done is None:
                continue
            found = self._compare_forward(layer, done, recorded, tape)
            if found is None and operation.is_norm:
                found = self._compare_cast(layer, done)
            if found is not None:
                return found
            runs.append(_Run(layer, done, recorded))
        return self._compare_pull_backs(runs) or self._compare_whole(side, advanced)

    def _operations(self) -> Iterator[tuple[int | None, nn.Module, Operation, Recorded, Tape]]:
        """(layer, PyTorch's part, operation, JAX's record of it, the results around it) in forward order."""
        on_device = jax.tree.map(jnp.asarray, self.parameters)
        recorded = recording.record(self.config, on_device, self.batch)
        start, layer, end = operations_of(self.config)
        rooms: list[tuple[int | None, nn.Module, tuple[Operation, ...], dict[str, Recorded]]] = [
            (None, self.twin, start, recorded.start),
            *((n, self.twin.layers[n], layer, one) for n, one in enumerate(recorded.layers)),
            (None, self.twin, end, recorded.end),
        ]
        for (number, part, operations, results), tape in zip(rooms, recorded.tapes, strict=True):
            for operation in operations:
                yield number, part, operation, results[operation.name], tape

    # --- forward ---

    def _compare_forward(
        self, layer: int | None, done: replay.Replay, recorded: Recorded, tape: Tape
    ) -> Divergence | None:
        operation, theirs = done.operation, as_array(done.output)
        bound = GRADIENT if operation.is_summed else PART
        error = relative_error(recorded.output, theirs)
        if error <= bound:
            return None
        case = Case(
            self.config,
            operation.name,
            "" if layer is None else f"layers.{layer}.",
            operation.scope,
            flatten(self.parameters),
            tuple(tape[name] for name in operation.inputs),
            tape,
            self.batch,
            recorded.output,
            theirs,
            bound,
        )
        cause = suspects.cause_of(case, operation.suspects)
        return Divergence(self.step, "forward", layer, operation.name, error, bound, cause)

    def _compare_cast(self, layer: int | None, done: replay.Replay) -> Divergence | None:
        """A norm in bfloat16, where it shows on which side of the cast the weight is multiplied."""
        operation, x = done.operation, as_array(done.inputs[0]).reshape(done.output.shape)
        assert operation.scope is not None
        tree = self.parameters if layer is None else self.parameters["layers"][layer]
        ours = recording.norm_in_bfloat16(self.config, operation, tree, x)
        theirs = replay.norm_in_bfloat16(done.part.get_submodule(operation.scope), x)
        error, bound = differing_share(ours, theirs), max(CAST_SHARE, 1 / ours.size)
        if error <= bound:
            return None
        weight = recording.scope_of(tree, operation.scope)["weight"].astype(np.float32)
        variants = suspects.norm_in_bfloat16(
            x.astype(jnp.bfloat16), weight, self.config.rms_norm_eps, before_cast=self.config.norm_weight_before_cast
        )
        cause = only(text for text, result in variants if differing_share(result, theirs) <= bound)
        return Divergence(self.step, "forward", layer, operation.name, error, bound, cause)

    # --- backward ---

    def _compare_pull_backs(self, runs: list[_Run]) -> Divergence | None:
        """Every operation alone, the last layer first; parts before the whole that they make."""
        for run in _backward_order(runs):
            compared = replay.gradients(run.done, run.recorded)
            found = self._first_wrong(compared, GRADIENT)
            if found is not None:
                _, error, cause = found
                return Divergence(self.step, "backward", run.layer, run.done.operation.name, error, GRADIENT, cause)
        return None

    def _compare_whole(self, side: Side, advanced: Advanced) -> Divergence | None:
        """The loss of the whole model, and its gradient by every parameter."""
        loss = torch_objective.summed_loss(self.twin, side.batch)
        bound = GRADIENT
        error = relative_error(advanced.loss_sum, as_array(loss))
        if error > bound:
            return Divergence(self.step, "forward", None, "summed_loss", error, bound, UNKNOWN)
        expected = replay.own_layout(advanced.gradients)
        compared = replay.compare(expected, replay.pull_back(loss, dict(self.twin.named_parameters())))
        found = self._first_wrong(compared, bound)
        if found is None:
            return None
        name, error, cause = found
        *place, module, _ = name.split(".")
        layer = int(place[1]) if place[:1] == ["layers"] else None
        return Divergence(self.step, "backward", layer, module, error, bound, cause)

    def _first_wrong(self, compared: replay.Compared, bound: float) -> tuple[str, float, str] | None:
        for name, (ours, theirs) in compared.items():
            error = relative_error(ours, theirs)
            if error > bound:
                return name, error, suspects.gradient_cause(name, compared, bound)
        return None


def _backward_order(runs: list[_Run]) -> Iterator[_Run]:
    """The operations after the blocks, each block from the last, the operations before them."""
    groups = [list(group) for _, group in groupby(runs, key=lambda run: run.layer)]
    for group in reversed(groups):
        yield from group if group[0].layer is not None else reversed(group)
