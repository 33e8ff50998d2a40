"""The JAX side of the divergence finder: the truth that PyTorch's operations are measured against.

Every operation is run on the results of the ones before it and pulled back from a random cotangent; a training step is
run by the package's own train_step.py. All in float64, compiled once for each shape (a block once for all layers).

B batch  T time  S = B*T positions  D hidden
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minigpt_bridge.finder.operations import Operation, Side, operations_of
from minigpt_jax import model as rooms
from minigpt_jax import objective
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.objective import BatchArrays, summed_loss
from minigpt_jax.optimizer import clip_by_global_norm, named_slots
from minigpt_jax.train_step import StepMetrics, TrainState, make_train_step

Tree = Any
Graph = Any


class Recorded(NamedTuple):
    """One operation of the JAX side."""

    output: Any
    cotangent: Any
    """Noise of the output's shape."""
    parameter_gradients: Tree
    """The pull-back of the cotangent to the parameters in the operation's scope."""
    input_gradients: tuple[Any, ...]
    """... and to its inputs."""


Tape = dict[str, Any]
"""Results by name: what later operations read."""


class Recording(NamedTuple):
    """Every operation of one forward pass, by name, with the tape that it read; NumPy arrays."""

    start: dict[str, Recorded]
    layers: list[dict[str, Recorded]]
    end: dict[str, Recorded]
    tapes: list[Tape]
    """Before the blocks, of each block, and after them."""


class Advanced(NamedTuple):
    """One micro-batch of training, and what lies between its gradient and the update."""

    state: TrainState
    metrics: StepMetrics
    loss_sum: jax.Array
    gradients: Tree
    mean: Tree
    """The window's summed gradients over its tokens; of the unfinished window, where no update follows."""
    clipped: Tree


def model_graphs(config: ModelConfig) -> tuple[Graph, Graph]:
    """The structure of the model and of any of its blocks, in float64 with the kernel written to be read."""
    options: dict[str, Any] = {"dtype": jnp.dtype("float64"), "kernel": "reference"}
    model = nnx.eval_shape(lambda: rooms.Transformer(config, **options, rngs=nnx.Rngs(0)))
    return nnx.split(model)[0], nnx.split(model.layers[0])[0]


def record(config: ModelConfig, parameters: Tree, batch: BatchArrays) -> Recording:
    """Run and pull back every operation of the forward pass of one micro-batch."""
    graph, block = model_graphs(config)
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim, config.vocab_size)
    noise = np.random.default_rng(0).standard_normal(batch.tokens.size * max(widths))
    tapes: list[Tape] = [{}]
    start = jax.device_get(_run_start(config, graph, parameters, batch, tapes[0], noise))
    cos, sin = start["rotary_angles"].output
    x = start["embed_tokens"].output
    layers = []
    for number in range(config.num_layers):
        tapes.append({"x": x, "cos": cos, "sin": sin})
        layers.append(jax.device_get(_run_layer(config, block, parameters["layers"][number], batch, tapes[-1], noise)))
        x = layers[-1]["block"].output
    table = nnx.merge(graph, parameters).head
    tapes.append({"x": x, "table": np.asarray(table)})
    end = jax.device_get(_run_end(config, graph, parameters, batch, tapes[-1], noise))
    for tape, recorded in zip(tapes, [start, *layers, end], strict=True):
        tape |= {name: one.output for name, one in recorded.items()}
    return Recording(start, layers, end, tapes)


@partial(jax.jit, static_argnames=("graph", "train", "total_updates"))
def advance(graph: Graph, train: TrainConfig, total_updates: int, state: TrainState, batch: BatchArrays) -> Advanced:
    """Train on one micro-batch, without dropout."""
    loss_sum, gradients = jax.value_and_grad(lambda tree: summed_loss(graph, tree, batch))(state.parameters)
    step = make_train_step(graph, train, total_updates=total_updates)
    new_state, metrics = step(state, batch, jax.random.key(0))
    window = named_slots(state.opt_state)
    tokens = jnp.maximum(window["token_sum"] + metrics.supervised_tokens, 1)
    mean = jax.tree.map(lambda total, new: (total + new) / tokens, window["gradient_sums"], gradients)
    clip = clip_by_global_norm(train.grad_clip)
    return Advanced(new_state, metrics, loss_sum, gradients, mean, clip.update(mean, clip.init(mean))[0])


@partial(jax.jit, static_argnames=("config", "graph"))
def _run_start(config: ModelConfig, graph: Graph, parameters: Tree, batch: BatchArrays, tape: Tape, noise: Any) -> Tree:
    return _run(operations_of(config).start, graph, parameters, batch, tape, noise)


@partial(jax.jit, static_argnames=("config", "graph"))
def _run_layer(config: ModelConfig, graph: Graph, parameters: Tree, batch: BatchArrays, tape: Tape, noise: Any) -> Tree:
    return _run(operations_of(config).layer, graph, parameters, batch, tape, noise)


@partial(jax.jit, static_argnames=("config", "graph"))
def _run_end(config: ModelConfig, graph: Graph, parameters: Tree, batch: BatchArrays, tape: Tape, noise: Any) -> Tree:
    return _run(operations_of(config).end, graph, parameters, batch, tape, noise)


def _run(
    operations: tuple[Operation, ...], graph: Graph, parameters: Tree, batch: BatchArrays, tape: Tape, noise: Any
) -> dict[str, Recorded]:
    side = Side(jnp, rooms, objective, {"dropout_rate": 0.0, "dropout_keys": (None, None)}, batch)
    results, recorded = dict(tape), {}
    for operation in operations:

        def run(own: Tree, *inputs: jax.Array, operation: Operation = operation) -> jax.Array:
            part = nnx.merge(graph, _with_scope(parameters, operation.scope, own))
            return operation.call(part, side, *inputs)

        inputs = [results[name] for name in operation.inputs]
        output, pull_back = jax.vjp(run, scope_of(parameters, operation.scope), *inputs)
        cotangent = noise[: output.size].reshape(output.shape)
        own, *others = pull_back(cotangent)
        recorded[operation.name] = Recorded(output, cotangent, own, tuple(others))
        results[operation.name] = output
    return recorded


def norm_in_bfloat16(config: ModelConfig, operation: Operation, tree: Tree, x: np.ndarray) -> np.ndarray:
    """A norm's output for float32 parameters and a bfloat16 input, as float32.

    Not compiled: XLA may leave out a cast to bfloat16 and back inside one compiled function.
    """
    weight = jnp.asarray(scope_of(tree, operation.scope)["weight"], jnp.float32)
    norm = rooms.RMSNorm(weight.size, eps=config.rms_norm_eps, weight_before_cast=config.norm_weight_before_cast)
    norm.weight = nnx.Param(weight)
    return np.asarray(norm(jnp.asarray(x, jnp.bfloat16)), np.float32)


def scope_of(tree: Tree, scope: str | None) -> Tree:
    """The part of a tree of parameters at a path with dots; the whole tree for "", nothing for None."""
    if scope is None:
        return {}
    for key in filter(None, scope.split(".")):
        tree = tree[key]
    return tree


def _with_scope(tree: Tree, scope: str | None, part: Tree) -> Tree:
    if scope is None:
        return tree
    if not scope:
        return part
    key, _, rest = scope.partition(".")
    return {**tree, key: _with_scope(tree[key], rest, part)}
