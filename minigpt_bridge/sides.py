"""One model in one framework, asked for every tensor that the proof compares.

The two classes answer the same questions in the same order, so that their answers can be laid side by side.

B batch  T time  S = B*T positions  D hidden
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from minigpt_jax import model as jax_rooms
from minigpt_jax import objective as jax_objective
from minigpt_jax import train_step as jax_steps
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.engine import trees_of as jax_trees
from minigpt_jax.formats.names import Parameters, flatten, unflatten
from minigpt_jax.loss import next_token_loss
from minigpt_jax.optimizer import with_named_slots
from minigpt_torch import model as torch_rooms
from minigpt_torch import objective as torch_objective
from minigpt_torch import train_step as torch_steps
from minigpt_torch.engine import take_optimizer
from minigpt_torch.engine import trees_of as torch_trees
from minigpt_torch.loss import next_token_loss as torch_loss
from minigpt_torch.weights import as_array, as_tensor, as_tree, make_model

Precision = Literal["float64", "float32", "bfloat16"]
Arrays = tuple[np.ndarray, ...]
"""A batch: tokens, targets, loss_weights, segment_ids and positions, each [B, T]."""

Inputs = dict[str, np.ndarray]
"""What each part of the model is given, [S, D], by the part's name: layers.0.self_attn, layers.0, ..., norm."""

Gradients = dict[str, np.ndarray]
"""By the parameter's path."""


class Value(NamedTuple):
    """One tensor of one side."""

    level: str
    name: str
    array: np.ndarray
    """A float in at least float32, or an integer."""


class Side(Protocol):
    """What the proof asks of a framework."""

    def batch(self, arrays: Arrays) -> Iterator[Value]:
        """The batch as the framework holds it."""
        ...

    def streams(self, arrays: Arrays) -> Iterator[Value]:
        """The stream after each block, [S, D]: every block on what the one before it gave."""
        ...

    def parts(self, arrays: Arrays, inputs: Inputs) -> Iterator[Value]:
        """Each part of the model on its given input."""
        ...

    def whole(self, arrays: Arrays) -> Iterator[Value]:
        """Logits, the loss of each position, the mean loss, and its gradient with respect to every parameter."""
        ...

    def optimizer(self, gradients: Gradients, config: TrainConfig) -> Iterator[Value]:
        """Every parameter and optimizer slot after one update by the given gradients, which are no side's own."""
        ...

    def training(self, batches: list[Arrays], config: TrainConfig, updates: tuple[int, ...]) -> Iterator[Value]:
        """Every micro-batch's loss, and every parameter and optimizer slot after each of `updates`."""
        ...


class JaxSide:
    """The model in JAX; logits, gradients and training compiled as in a run, its parts eager."""

    def __init__(self, config: ModelConfig, parameters: Parameters, precision: Precision):
        self.config, self.dtype = config, jnp.dtype(precision)
        self.graph = jax_rooms.model_graph(config, dtype=self.dtype, kernel="blocked")
        self.parameters = jax.tree.map(jnp.asarray, stored(parameters, precision))

    def batch(self, arrays: Arrays) -> Iterator[Value]:
        """The batch as JAX holds it."""
        for name, array in _jax_batch(arrays)._asdict().items():
            if array is not None:
                yield Value("batch", name, np.asarray(array))

    def streams(self, arrays: Arrays) -> Iterator[Value]:
        """The stream after each block, [S, D]."""
        *blocks, last = (value for name, value in self.inputs(arrays).items() if _is_stream(name))
        for number, stream in enumerate([*blocks[1:], last]):
            yield Value("stream", f"layers.{number}", stream)

    def inputs(self, arrays: Arrays) -> Inputs:
        """What each part is given when the whole model runs: the inputs on which both sides are compared."""
        model, options, batch = nnx.merge(self.graph, self.parameters), self._options(arrays), _jax_batch(arrays)
        x = jnp.take(model.embed_tokens.embedding[...], batch.tokens.reshape(-1), axis=0).astype(self.dtype)
        given = {}
        for number, layer in enumerate(model.layers):
            normed = layer.input_layernorm(x)
            middle = x + layer.self_attn(normed, **options)
            prefix = f"layers.{number}"
            given[f"{prefix}.input_layernorm"], given[f"{prefix}.self_attn"] = x, normed
            given[f"{prefix}.post_attention_layernorm"] = middle
            given[f"{prefix}.mlp"] = layer.post_attention_layernorm(middle)
            given[prefix] = x
            x = layer(x, **options, dropout_rate=0.0, dropout_keys=(None, None))
        given["norm"] = x
        return {name: _readable(value) for name, value in given.items()}

    def parts(self, arrays: Arrays, inputs: Inputs) -> Iterator[Value]:
        """Each part of the model on its given input."""
        model, options = nnx.merge(self.graph, self.parameters), self._options(arrays)
        for name, given in inputs.items():
            x, part, kind = jnp.asarray(given, self.dtype), _part(model, name), _kind(name)
            if kind == "block":
                result = part(x, **options, dropout_rate=0.0, dropout_keys=(None, None))
            else:
                result = part(x, **(options if kind == "self_attn" else {}))
            yield Value("sub-module", name, _readable(result))

    def _options(self, arrays: Arrays) -> dict[str, jax.Array]:
        batch = _jax_batch(arrays)
        cos, sin = jax_rooms.rotary_angles(
            batch.positions, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=self.dtype
        )
        return {"segment_ids": batch.segment_ids, "cos": cos, "sin": sin}

    @cached_property
    def _compiled(self) -> Any:
        def logits(parameters: Any, batch: jax_objective.BatchArrays) -> jax.Array:
            model = nnx.merge(self.graph, parameters)
            hidden = model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions)
            return model.logits(hidden)

        def position_losses(parameters: Any, batch: jax_objective.BatchArrays) -> jax.Array:
            model = nnx.merge(self.graph, parameters)
            hidden = model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions)

            def alone(position: tuple[jax.Array, jax.Array]) -> jax.Array:
                return next_token_loss(position[0][None], model.head, position[1][None], jnp.ones(1))

            return jax.lax.map(alone, (hidden, batch.targets.reshape(-1)))

        def loss(parameters: Any, batch: jax_objective.BatchArrays) -> jax.Array:
            return jax_objective.summed_loss(self.graph, parameters, batch)

        return jax.jit(logits), jax.jit(position_losses), jax.jit(jax.value_and_grad(loss))

    def whole(self, arrays: Arrays) -> Iterator[Value]:
        """Logits, the loss of each position, the mean loss, and its gradient with respect to every parameter."""
        logits, position_losses, loss_and_gradients = self._compiled
        batch = _jax_batch(arrays)
        yield Value("logits", "logits", _readable(logits(self.parameters, batch)))
        yield Value("loss", "each position", np.asarray(position_losses(self.parameters, batch)))
        loss, gradients = loss_and_gradients(self.parameters, batch)
        yield from _mean_loss(arrays, float(loss), flatten(jax.device_get(gradients)))

    def training(self, batches: list[Arrays], config: TrainConfig, updates: tuple[int, ...]) -> Iterator[Value]:
        """Every micro-batch's loss, and every parameter and optimizer slot after each of `updates`."""
        total = max(updates)
        step = jax_steps.make_train_step(self.graph, config, total_updates=total)
        # The step gives its state's buffers away; the parameters are still needed.
        state = jax_steps.init_state(jax.tree.map(jnp.copy, self.parameters), config, total_updates=total)
        for number, arrays in enumerate(batches):
            state, metrics = step(state, _jax_batch(arrays), jax.random.key(0))
            yield _step_loss(number, np.asarray(metrics.loss_sum) / np.asarray(metrics.supervised_tokens))
            # Read off the state, not counted: a micro-batch may be skipped.
            if int(state.opt_state.mini_step) == 0 and int(state.opt_state.gradient_step) in updates:
                yield from _state(f"update {int(state.opt_state.gradient_step)}", jax.device_get(jax_trees(state)))

    def optimizer(self, gradients: Gradients, config: TrainConfig) -> Iterator[Value]:
        """Every parameter and optimizer slot after one update by the given gradients."""
        state = jax_steps.init_state(jax.tree.map(jnp.copy, self.parameters), config, total_updates=config.steps or 1)
        slots = _one_micro_batch(jax.device_get(jax_trees(state))["optimizer"], gradients)
        opt_state = with_named_slots(state.opt_state, jax.tree.map(jnp.asarray, slots))
        flush = jax_steps.make_flush_step(config, total_updates=config.steps or 1)
        yield from _state("optimizer", jax.device_get(jax_trees(flush(state._replace(opt_state=opt_state))[0])))


class TorchSide:
    """The model in PyTorch, with the attention that is written out."""

    def __init__(self, config: ModelConfig, parameters: Parameters, precision: Precision):
        self.config, self.dtype = config, getattr(torch, precision)
        self.parameters = stored(parameters, precision)
        self.model = make_model(config, self.parameters, dtype=self.dtype)

    def batch(self, arrays: Arrays) -> Iterator[Value]:
        """The batch as PyTorch holds it: ids in int64, which its look-ups want."""
        for name, tensor in torch_objective.batch_tensors(arrays)._asdict().items():
            if tensor is not None:
                yield Value("batch", name, tensor.numpy())

    @torch.no_grad()
    def streams(self, arrays: Arrays) -> Iterator[Value]:
        """The stream after each block, [S, D]."""
        options = self._options(arrays)
        x = self.model.embed_tokens(torch_objective.batch_tensors(arrays).tokens.reshape(-1)).to(self.dtype)
        for number, layer in enumerate(self.model.layers):
            x = layer(x, **options, dropout_rate=0.0, dropout_masks=(None, None))
            yield Value("stream", f"layers.{number}", as_array(x))

    @torch.no_grad()
    def parts(self, arrays: Arrays, inputs: Inputs) -> Iterator[Value]:
        """Each part of the model on its given input."""
        options = self._options(arrays)
        for name, given in inputs.items():
            x, part, kind = as_tensor(given, "cpu").to(self.dtype), _part(self.model, name), _kind(name)
            if kind == "block":
                result = part(x, **options, dropout_rate=0.0, dropout_masks=(None, None))
            else:
                result = part(x, **(options if kind == "self_attn" else {}))
            yield Value("sub-module", name, as_array(result))

    def _options(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        batch = torch_objective.batch_tensors(arrays)
        cos, sin = torch_rooms.rotary_angles(
            batch.positions, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=self.dtype
        )
        return {"segment_ids": batch.segment_ids, "cos": cos, "sin": sin}

    def whole(self, arrays: Arrays) -> Iterator[Value]:
        """Logits, the loss of each position, the mean loss, and its gradient with respect to every parameter."""
        batch = torch_objective.batch_tensors(arrays)
        with torch.no_grad():
            hidden = self.model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions)
            logits = as_array(self.model.logits(hidden))
            one, targets = torch.ones(1), batch.targets.reshape(-1)
            losses = [
                torch_loss(hidden[at : at + 1], self.model.head, targets[at : at + 1], one) for at in range(len(hidden))
            ]
        # Not inside: a generator that waits there would switch gradients off for whoever runs meanwhile.
        yield Value("logits", "logits", logits)
        yield Value("loss", "each position", as_array(torch.stack(losses)))
        loss = torch_objective.summed_loss(self.model, batch)
        named = dict(self.model.named_parameters())
        gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        yield from _mean_loss(arrays, loss.item(), flatten(as_tree(gradients, self.config)))

    def training(self, batches: list[Arrays], config: TrainConfig, updates: tuple[int, ...]) -> Iterator[Value]:
        """Every micro-batch's loss, and every parameter and optimizer slot after each of `updates`."""
        model = make_model(self.config, self.parameters, dtype=self.dtype)
        state = torch_steps.init_state(model, config)
        for number, arrays in enumerate(batches):
            batch = torch_objective.batch_tensors(arrays)
            metrics = torch_steps.train_step(state, batch, config, total_updates=max(updates))
            real = self.parameters["norm"]["weight"].dtype
            yield _step_loss(number, np.asarray(metrics.loss_sum / metrics.supervised_tokens, real))
            # Read off the state, not counted: a micro-batch may be skipped.
            if state.micro_steps == 0 and state.updates in updates:
                yield from _state(f"update {state.updates}", torch_trees(state))

    def optimizer(self, gradients: Gradients, config: TrainConfig) -> Iterator[Value]:
        """Every parameter and optimizer slot after one update by the given gradients."""
        state = torch_steps.init_state(make_model(self.config, self.parameters, dtype=self.dtype), config)
        take_optimizer(state, _one_micro_batch(torch_trees(state)["optimizer"], gradients))
        torch_steps.flush(state, config, total_updates=config.steps or 1)
        yield from _state("optimizer", torch_trees(state))


def stored(parameters: Parameters, precision: Precision) -> Parameters:
    """The parameters as training holds them: float64 for float64, else float32 (bfloat16 is a compute dtype)."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, "float64" if precision == "float64" else "float32"), parameters)


def _mean_loss(arrays: Arrays, loss_sum: float, gradients: dict[str, np.ndarray]) -> Iterator[Value]:
    """The loss and gradients that training uses: over the supervised tokens."""
    tokens = max(float(arrays[2].sum()), 1.0)
    yield Value("loss", "mean loss", np.asarray(loss_sum / tokens, next(iter(gradients.values())).dtype))
    for path in sorted(gradients):
        yield Value("gradient", path, gradients[path] / np.asarray(tokens, gradients[path].dtype))


def _step_loss(number: int, loss: np.ndarray) -> Value:
    return Value("trajectory", f"loss of micro-batch {number}", loss)


def _state(level: str, trees: Any) -> Iterator[Value]:
    flat = flatten(trees)
    for path in sorted(flat):
        yield Value(level, path, np.asarray(flat[path]))


def _one_micro_batch(slots: dict[str, Any], gradients: Gradients) -> dict[str, Any]:
    """A fresh optimizer's slots with the given gradients as its unfinished window, over one token."""
    real = slots["token_sum"].dtype
    sums = unflatten({path: gradient.astype(real) for path, gradient in gradients.items()})
    return {**slots, "gradient_sums": sums, "token_sum": np.ones((), real), "micro_steps": np.ones((), np.int32)}


def _kind(name: str) -> str:
    """norm, self_attn, mlp, ..., or block."""
    last = name.rpartition(".")[2]
    return "block" if last.isdigit() else last


def _is_stream(name: str) -> bool:
    """Whether the input of this part is the stream that runs from block to block."""
    return name == "norm" or _kind(name) == "block"


def _part(model: Any, name: str) -> Any:
    """The module called `name`, whose attributes have the same names on both sides."""
    for key in name.split("."):
        model = model[int(key)] if key.isdigit() else getattr(model, key)
    return model


def _jax_batch(arrays: Arrays) -> jax_objective.BatchArrays:
    return jax_objective.BatchArrays(*map(jnp.asarray, arrays))


def _readable(array: jax.Array) -> np.ndarray:
    """In NumPy's dtypes: bfloat16 as float32."""
    return np.asarray(array.astype(jnp.promote_types(array.dtype, jnp.float32)))
