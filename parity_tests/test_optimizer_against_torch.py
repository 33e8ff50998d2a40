"""The update of a whole window against torch.optim.AdamW and torch's clipping; Muon against optax and torch's."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from minigpt_jax.config import TrainConfig
from minigpt_jax.optimizer import augmented, clip_by_global_norm, make_optimizer
from minigpt_jax.schedule import learning_rate_at

torch = pytest.importorskip("torch")

from minigpt_torch.muon import Muon  # noqa: E402

SHAPES = {"embedding": (7, 4), "matrix": (4, 5), "norm": (4,)}


def normal_tree(rng, scale=1.0):
    return {name: scale * rng.standard_normal(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 0.1, 1.0, 1e3])
def test_clipping_is_that_of_torch(scale, float64, bound, relative_error):
    gradients = normal_tree(np.random.default_rng(0), scale)
    rule = clip_by_global_norm(0.7)
    ours, state = rule.update(gradients, rule.init(gradients))
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.7)
    errors = [relative_error(ours[name], parameter.grad) for name, parameter in zip(SHAPES, parameters, strict=True)]
    assert max(*errors, relative_error(state.grad_norm, norm)) <= bound.update


@cache
def compiled_update(config, total_updates):
    return jax.jit(make_optimizer(config, total_updates=total_updates).update)


def our_run(config, start, windows, total_updates):
    """Parameters and moments after the windows, each a pair (summed gradients, tokens)."""
    optimizer = make_optimizer(config, total_updates=total_updates)
    tree = augmented(jax.tree.map(jnp.asarray, start))
    state = optimizer.init(tree)
    update = compiled_update(config, total_updates)
    for sums, tokens in windows:
        updates, state = update(augmented(sums, tokens), state, tree)
        tree = augmented(optax.apply_updates(tree["parameters"], updates["parameters"]))
    return {
        "parameters": tree["parameters"],
        "exp_avg": optax.tree.get(state, "mu"),
        "exp_avg_sq": optax.tree.get(state, "nu"),
    }


def torch_run(config, start, windows, total_updates):
    parameters = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in start.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameters["embedding"], parameters["matrix"]], "weight_decay": config.weight_decay},
            {"params": [parameters["norm"]], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda count: float(learning_rate_at(count, config, total_updates=total_updates)) / config.learning_rate,
    )
    for sums, tokens in windows:
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(sums[name] / tokens)
        torch.nn.utils.clip_grad_norm_(parameters.values(), config.grad_clip)
        optimizer.step()
        scheduler.step()
    slots = {
        slot: {name: optimizer.state[parameter][slot] for name, parameter in parameters.items()}
        for slot in ("exp_avg", "exp_avg_sq")
    }
    return {"parameters": {name: parameter.detach() for name, parameter in parameters.items()}, **slots}


@pytest.mark.parametrize("updates", [1, 2, 10, 200])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_adamw_with_warm_up_decay_and_clipping_is_that_of_torch(updates, schedule, float64, bound, relative_error):
    rng = np.random.default_rng(updates)
    config = TrainConfig(
        learning_rate=3e-3, warmup_steps=5, schedule=schedule, weight_decay=0.1, grad_clip=5.0, adam_eps=1e-6
    )
    start = normal_tree(rng)
    # Mean gradients of norms from about 0.1 to 15, so some are clipped; the embedding's first row never has one.
    windows = []
    for _ in range(updates):
        tokens = float(rng.integers(1, 900))
        sums = normal_tree(rng, tokens * rng.choice([0.01, 0.3, 2.0]))
        sums["embedding"][0] = 0
        windows.append((sums, tokens))
    ours, theirs = (run(config, start, windows, 200) for run in (our_run, torch_run))
    errors = {
        f"{slot} {name}": relative_error(ours[slot][name], theirs[slot][name]) for slot in ours for name in SHAPES
    }
    print(f"after {updates} updates:", max(errors.items(), key=lambda item: item[1]))
    assert max(errors.values()) <= (bound.update if updates < 200 else bound.trajectory)


# --- Muon ---


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5), (1, 7)])
def test_a_matrix_is_made_orthogonal_as_optax_does(shape, float64, bound, relative_error):
    matrix = np.random.default_rng(0).standard_normal(shape)
    ours = optax.contrib.scale_by_muon()
    theirs = Muon([parameter := torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))], weight_decay=0.0)
    theirs.param_groups[0]["lr"] = 1.0
    state = ours.init(jnp.zeros(shape))
    for number in range(3):
        expected, state = ours.update(jnp.asarray(matrix * (number + 1)), state)
        before = parameter.detach().clone()
        parameter.grad = torch.from_numpy(matrix * (number + 1))
        theirs.step()
        size = 0.2 * max(shape) ** 0.5
        assert relative_error((before - parameter.detach()) / size, expected) <= bound.update


def test_muon_goes_where_the_one_of_torch_goes_as_far_as_bfloat16_can_tell():
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(24, 48)) for _ in range(2)]
    matrices[1].data.copy_(matrices[0].data)
    before = matrices[0].detach().clone()
    own = Muon(matrices[:1], weight_decay=0.1)
    own.param_groups[0]["lr"] = 0.05
    torchs = torch.optim.Muon(matrices[1:], lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(24, 48)
        for matrix, optimizer in zip(matrices, (own, torchs), strict=True):
            matrix.grad = gradient.clone()
            optimizer.step()
    ours, theirs = (matrix.detach() - before for matrix in matrices)
    assert torch.linalg.vector_norm(ours - theirs) <= 0.05 * torch.linalg.vector_norm(theirs)
