"""The divergence finder: mistakes planted in the PyTorch twin, and what is said of them."""

import dataclasses
import functools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from twins import SMALL, SMALL_3, random_batch, random_parameters, training  # noqa: E402

from minigpt_bridge.finder.search import find_divergence  # noqa: E402
from minigpt_torch import attention as torch_attention  # noqa: E402
from minigpt_torch import model as torch_rooms  # noqa: E402
from minigpt_torch import objective as torch_objective  # noqa: E402
from minigpt_torch import optimizer as torch_optimizer  # noqa: E402
from minigpt_torch import train_step as torch_steps  # noqa: E402
from minigpt_torch.weights import make_model  # noqa: E402

TRAIN = training(weight_decay=1e-2, steps=8)


def find(config=SMALL, *, steps=2, change=lambda twin: None):
    """The finder's word on a twin that `change` has changed."""

    def make_twin(*arguments, **options):
        twin = make_model(*arguments, **options)
        change(twin)
        return twin

    batches = [random_batch(config, seed=seed) for seed in range(4)]
    return find_divergence(config, random_parameters(config), TRAIN, batches, steps=steps, make_twin=make_twin)


def place(found):
    return found.step, found.phase, found.layer, found.operation


# --- The mistakes: each either replaces a function of the package or changes the model ---


def replace(module, name, wrong):
    """A plant that puts `wrong(right, ...)` in the place of a function."""

    def plant(monkeypatch):
        monkeypatch.setattr(module, name, functools.partial(wrong, getattr(module, name)))

    return plant


def replace_method(kind, name, wrong):
    """The same for a method, which is given its object after `right`."""

    def plant(monkeypatch):
        right = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *arguments, **options: wrong(right, *arguments, **options))

    return plant


def in_layers(change, numbers=(0, 1)):
    """A change of these blocks."""

    def apply(twin):
        for number in numbers:
            change(twin.layers[number])

    return apply


def rotate_backwards(rotate, x, cos, sin):
    return rotate(x, cos, -sin)


def rotate_in_attention_backwards(forward, self, x, *, segment_ids, cos, sin):
    return forward(self, x, segment_ids=segment_ids, cos=cos, sin=-sin)


def angles_backwards(rotary_angles, *arguments, **options):
    cos, sin = rotary_angles(*arguments, **options)
    return cos, -sin


def other_eps(twin):
    for module in twin.modules():
        if isinstance(module, torch_rooms.RMSNorm):
            module.eps = 1e-6


def other_cast(twin):
    for module in twin.modules():
        if isinstance(module, torch_rooms.RMSNorm):
            module.weight_before_cast = not module.weight_before_cast


def untie(twin):
    twin.lm_head = torch_rooms.Linear(twin.config.hidden_size, twin.config.vocab_size)
    twin.lm_head.weight = nn.Parameter(twin.embed_tokens.weight.detach().clone())


def see_one_ahead(tril, self):
    return tril(self, 1)


def see_one_too_few(tril, self):
    return tril(self, -1)


def decay_less_from_step_2(update, state, *arguments, **options):
    if state.updates >= 1:
        state.optimizers[0].param_groups[0]["weight_decay"] = 1e-4
    return update(state, *arguments, **options)


def clip_without_eps(_, parameters, max_norm):
    everything = list(parameters)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in everything])
    for parameter in everything:
        parameter.grad *= min(1, max_norm / norm)
    return norm


def one_update_late(learning_rate, updates, config, *, total_updates):
    return learning_rate(updates - 1, config, total_updates=total_updates)


def exchange_gate_and_up(block):
    block.mlp.gate_proj, block.mlp.up_proj = block.mlp.up_proj, block.mlp.gate_proj


def activate_the_wrong_branch(_, self, x, **options):
    return self.down_proj(self.gate_proj(x) * F.silu(self.up_proj(x)))


def activate_the_wrong_branch_unseen(_, self, x, **options):
    inner = self.gate_proj(x) * F.silu(self.up_proj(x))
    return inner @ self.down_proj.weight.T


def options_of_optimizer(**changes):
    def wrong(make_optimizers, trained, config):
        return make_optimizers(trained, dataclasses.replace(config, **changes))

    return replace(torch_steps, "make_optimizers", wrong)


def sum_instead_of_mean(update, state, sums, tokens, config, *, rate):
    return update(state, sums, 1.0, config, rate=rate)


def accumulate_nothing(train_step, state, batch, config, **options):
    return train_step(state, batch, dataclasses.replace(config, accumulation_steps=1), **options)


def double_the_gradient(summed_loss, *inputs, **options):
    loss = summed_loss(*inputs, **options)
    return 2 * loss - loss.detach()


def detach_values(attention, query, key, value, **options):
    return attention(query, key, value.detach(), **options)


def leave_out_the_residual(_, self, x, *, segment_ids, cos, sin, **__):
    x = self.self_attn(self.input_layernorm(x), segment_ids=segment_ids, cos=cos, sin=sin)
    return x + self.mlp(self.post_attention_layernorm(x))


def tile(attention, query, key, value, **options):
    groups = query.shape[2] // key.shape[2]
    return attention(query, key.repeat(1, 1, groups, 1), value.repeat(1, 1, groups, 1), **options)


def forget_the_scale(attend, query, *rest):
    return attend(query * query.shape[-1] ** 0.5, *rest)


def with_bias(linear, bias):
    wrong = nn.Linear(linear.in_features, linear.out_features, dtype=torch.float64)
    wrong.weight = linear.weight
    wrong.bias = nn.Parameter(torch.full_like(wrong.bias, bias))
    return wrong


def bias_up_proj(block):
    block.mlp.up_proj = with_bias(block.mlp.up_proj, 0.01)


def bias_o_proj_with_zeros(block):
    block.self_attn.o_proj = with_bias(block.self_attn.o_proj, 0.0)


SINE = "the rotation's sine has the wrong sign"
SWAPPED = "gate and up are swapped"
FUTURE = "the mask is off by one: a position sees one of the future"
TOO_FEW = "the mask is off by one: a position does not see itself"
UNTIED = "lm_head.weight is not tied to embed_tokens.weight but a separate copy: its gradient is missing there"
AFTER = "the weight is multiplied before the cast back instead of after it"

PLANTED = {
    "rope sign": (replace(torch_rooms, "rotate", rotate_backwards), (1, "forward", 0, "q_rotate"), SINE),
    "attention mask, one ahead": (
        replace_method(torch.Tensor, "tril", see_one_ahead), (1, "forward", 0, "attention"), FUTURE,
    ),
    "attention mask, one too few": (
        replace_method(torch.Tensor, "tril", see_one_too_few), (1, "forward", 0, "attention"), TOO_FEW,
    ),
    "weight decay": (
        options_of_optimizer(weight_decay=1e-4), (1, "update", None, "weight_decay"),
        "weight decay is 0.0001 instead of 0.01",
    ),
    "clip eps": (
        replace(torch_steps, "clip_by_global_norm", clip_without_eps), (1, "update", None, "clip"),
        "clipping leaves out the eps of 1e-6 beside the norm",
    ),
    "schedule": (
        replace(torch_steps, "learning_rate", one_update_late), (1, "update", None, "learning_rate"),
        "the schedule is one update late",
    ),
    "kv heads": (
        replace(torch_rooms, "attention", tile), (1, "forward", 0, "attention"),
        "kv heads are tiled instead of repeated",
    ),
    "scale": (
        replace(torch_attention, "_attend", forget_the_scale), (1, "forward", 0, "attention"),
        "scores are not divided by sqrt(head_dim)",
    ),
    # The same mistakes elsewhere.
    "rope sign, in the angles": (
        replace(torch_rooms, "rotary_angles", angles_backwards), (1, "forward", None, "rotary_angles"), SINE,
    ),
    "rope sign, inside attention": (
        replace_method(torch_rooms.Attention, "forward", rotate_in_attention_backwards),
        (1, "forward", 0, "self_attn"), SINE,
    ),
    "gate and up, in the product": (
        replace_method(torch_rooms.FeedForward, "forward", activate_the_wrong_branch),
        (1, "forward", 0, "silu_product"), SWAPPED,
    ),
    "gate and up, out of sight": (
        replace_method(torch_rooms.FeedForward, "forward", activate_the_wrong_branch_unseen),
        (1, "forward", 0, "mlp"), SWAPPED,
    ),
    "schedule, in the formula": (
        replace(torch_optimizer, "learning_rate_at", lambda right, u, *a, **o: right(max(u - 1, 0), *a, **o)),
        (2, "update", None, "learning_rate"), "the schedule is one update late",
    ),
    # Others.
    "residual": (
        replace_method(torch_rooms.Block, "forward", leave_out_the_residual),
        (1, "forward", 0, "attention_residual"), "the attention's residual is not added",
    ),
    "loss": (
        replace(torch_objective, "next_token_loss", lambda loss, *inputs: loss(*inputs) / inputs[3].sum()),
        (1, "forward", None, "loss"), "the loss is divided by its supervised tokens",
    ),
    "whole loss": (
        replace(torch_objective, "summed_loss", lambda loss, *inputs, **options: 2 * loss(*inputs, **options)),
        (1, "forward", None, "summed_loss"), "unknown cause",
    ),
    "whole model": (
        replace_method(torch_rooms.Transformer, "forward", lambda forward, *inputs, **o: 1.5 * forward(*inputs, **o)),
        (1, "forward", None, "model"), "its result is multiplied by 1.5",
    ),
    "whole gradient": (
        replace(torch_objective, "summed_loss", double_the_gradient), (1, "backward", None, "embed_tokens"),
        "the gradient by embed_tokens.weight is multiplied by 2",
    ),
    "gradient": (
        replace(torch_rooms, "attention", detach_values), (1, "backward", 1, "attention"),
        "no gradient arrives at v_proj",
    ),
    "window": (
        replace(torch_steps, "train_step", accumulate_nothing), (1, "update", None, "accumulation"),
        "an update is made before the window is full",
    ),
    "mean": (
        replace(torch_steps, "_update", sum_instead_of_mean), (1, "update", None, "mean_gradient"),
        "the gradient sum is not divided by its tokens",
    ),
    "beta1": (
        options_of_optimizer(beta1=0.95), (1, "update", None, "first_moment"), "beta1 is 0.95 instead of 0.9",
    ),
    "beta2": (
        options_of_optimizer(beta2=0.999), (1, "update", None, "second_moment"), "beta2 is 0.999 instead of 0.95",
    ),
    "AdamW's eps": (
        options_of_optimizer(adam_eps=1e-6), (1, "update", None, "parameter_update"),
        "AdamW's eps is 1e-06 instead of 1e-08",
    ),
}  # fmt: skip

CHANGED = {
    "eps": (other_eps, (1, "forward", 0, "input_layernorm"), "eps is 1e-06 instead of 1e-05"),
    "cast": (other_cast, (1, "forward", 0, "input_layernorm"), AFTER),
    "untied head": (untie, (1, "backward", None, "head"), UNTIED),
    "gate and up": (
        in_layers(exchange_gate_and_up), (1, "forward", 0, "gate_proj"), "it is swapped with up_proj",
    ),
    "bias": (in_layers(bias_up_proj), (1, "forward", 0, "up_proj"), "a stray bias is added"),
    "bias of zeros": (
        in_layers(bias_o_proj_with_zeros, [0]), (1, "backward", 0, "o_proj"), "a stray bias is added",
    ),
    # One layer alone.
    "gate and up of layer 1": (
        in_layers(exchange_gate_and_up, [1]), (1, "forward", 1, "gate_proj"), "it is swapped with up_proj",
    ),
    "bias of layer 1": (in_layers(bias_up_proj, [1]), (1, "forward", 1, "up_proj"), "a stray bias is added"),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "where", "cause"), PLANTED.values(), ids=PLANTED)
def test_a_wrong_function_is_located_and_explained(plant, where, cause, monkeypatch):
    plant(monkeypatch)
    found = find()
    assert (place(found), found.cause) == (where, cause)
    assert found.error > 1e3 * found.bound


@pytest.mark.parametrize(("change", "where", "cause"), CHANGED.values(), ids=CHANGED)
def test_a_wrong_model_is_located_and_explained(change, where, cause):
    found = find(change=change)
    assert (place(found), found.cause) == (where, cause)
    assert found.error > 10 * found.bound


@pytest.mark.parametrize("config", [SMALL, SMALL_3], ids=["2-series", "3-series"])
def test_twins_do_not_diverge(config):
    assert find(config, steps=3) is None


def test_the_cast_of_the_3_series_is_told_from_that_of_the_2_series():
    found = find(SMALL_3, change=other_cast)
    assert place(found) == (1, "forward", 0, "input_layernorm")
    assert found.cause == "the weight is multiplied after the cast back instead of before it"


def test_a_mistake_that_begins_at_step_2_is_found_there(monkeypatch):
    replace(torch_steps, "_update", decay_less_from_step_2)(monkeypatch)
    found = find(steps=3)
    assert place(found) == (2, "update", None, "weight_decay")
    assert found.cause == "weight decay is 0.0001 instead of 0.01"


def test_a_mistake_that_nobody_foresaw_is_located(monkeypatch):
    replace(torch_rooms, "rotate", lambda rotate, *inputs: torch.tanh(rotate(*inputs)))(monkeypatch)
    found = find()
    assert place(found) == (1, "forward", 0, "q_rotate")
    assert found.cause == "unknown cause"


def test_a_divergence_is_one_line_for_people():
    found = find(change=in_layers(bias_up_proj, [1]))
    assert str(found) == (
        "step 1, forward, layer 1, up_proj: a stray bias is added (error 2.3e-03, rounding explains 1e-13)"
    )
