"""What must not pass for a model: damaged files, tensors that are no weights, configs that are of another function."""

import json
import shutil
from contextlib import suppress

import ml_dtypes  # noqa: F401  (from then on NumPy knows bfloat16 and float8)
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file, save_file  # noqa: E402
from small_runs import small_config, train  # noqa: E402
from test_formats import SERIES_2, written  # noqa: E402

from minigpt_bridge.convert import convert  # noqa: E402
from minigpt_bridge.models import open_model  # noqa: E402
from minigpt_jax.errors import UserError  # noqa: E402

pytestmark = pytest.mark.usefixtures("run_environment")


def reading(path):
    return open_model(path).read_parameters()


@pytest.fixture
def weights(tmp_path):
    """A whole .safetensors model."""
    return written(tmp_path, SERIES_2)[0]


def changed(path, change):
    """The file with `change` made to its tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("cast", "message"),
    [
        (lambda array: (array * 20).astype(np.int8), "is int8; weights are float32"),
        (lambda array: array > 0, "is bool; weights are"),
        (lambda array: array * np.float32(np.nan), "holds values that are not finite"),
        (lambda array: array / np.float32(0), "holds values that are not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_tensors_that_are_no_weights_are_refused(weights, cast, message):
    def change(tensors):
        tensors["model.norm.weight"] = cast(tensors["model.norm.weight"])

    with pytest.raises(UserError, match=f"norm.weight {message}"):
        reading(changed(weights, change))


def test_a_dtype_that_numpy_lacks_is_one_line(weights):
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    save({name: tensor.to(torch.float8_e4m3fn) for name, tensor in load(weights).items()}, weights)
    with pytest.raises(UserError) as error:
        reading(weights)
    assert "float8" in str(error.value)


def test_one_tensor_under_two_names_is_refused(weights):
    def change(tensors):
        tensors["module.model.norm.weight"] = 100 * tensors["model.norm.weight"]

    with pytest.raises(UserError, match=r"holds model\.norm\.weight twice"):
        reading(changed(weights, change))


def test_of_many_faults_the_first_are_listed(weights):
    with pytest.raises(UserError, match=r"; and 8 more$"):
        reading(changed(weights, lambda tensors: [tensors.pop(name) for name in list(tensors)[:14]]))


@pytest.mark.parametrize("content", [b"hello world\n", b"\x80", b"", b"\x80\x02}q\x00."])
def test_any_bytes_are_no_traceback(tmp_path, content):
    path = tmp_path / "model.pth"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        open_model(path)
    assert "weights_only" not in str(error.value)


def test_random_damage_is_no_traceback(tmp_path, weights):
    path = tmp_path / "whole.pth"
    convert(weights, path, to="torch")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(whole)
        for at in rng.integers(0, 2000, 5):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        # Some damage leaves a whole file; any other error fails the test.
        with suppress(UserError):
            reading(path)


def test_code_in_a_file_does_not_run(tmp_path):
    class Code:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"model.norm.weight": Code()}, tmp_path / "model.pth")
    with pytest.raises(UserError, match="more than tensors"):
        open_model(tmp_path / "model.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(3, dtype=torch.int32), "torch.int32"),
        (torch.ones(3, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(3).to_sparse(), "torch.sparse_coo"),
        (torch.ones(3, device="meta"), "meta"),
    ],
)
def test_torch_tensors_that_are_no_weights_are_refused(tmp_path, tensor, kind):
    torch.save({"model.norm.weight": tensor}, tmp_path / "model.pth")
    with pytest.raises(UserError, match=kind):
        open_model(tmp_path / "model.pth")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear' is not supported"),
        ({"rope_parameters": "x"}, "rope_parameters must be an object"),
        ({"rope_parameters": None, "rope_theta": "10000"}, "rope_theta must be float"),
        ({"rope_parameters": None, "rope_theta": True}, "rope_theta must be float"),
        ({"rope_parameters": None, "rope_theta": float("inf")}, "rope_theta must be positive and finite"),
        ({"model_type": []}, "is not supported; llama and qwen3 are"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_a_config_of_another_function_is_refused(tmp_path, weights, fields, message):
    pytest.importorskip("transformers")
    directory = tmp_path / "exported"
    convert(weights, directory, to="hf")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(UserError, match=message):
        open_model(directory)


def test_a_name_that_is_too_long_is_one_line(weights, tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        open_model("x" * 300)
    with pytest.raises(UserError, match="File name too long"):
        convert(weights, tmp_path / ("x" * 300), to="run")


# --- Runs ---


def resumable(directory, backend, **changes):
    return small_config(directory, backend=backend, dtype="float32", **changes)


def unfinished(directory, backend):
    """A run that has something left to do, and its directory."""
    run = train(resumable(directory, backend)).directory
    events = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text("".join(f"{line}\n" for line in events if "finished" not in line))
    shutil.rmtree(run / "checkpoints" / "6")
    return run


@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_run_whose_config_was_edited_is_not_resumed(tmp_path, backend, field):
    run = unfinished(tmp_path, backend)
    config = json.loads((run / "config.json").read_text())
    config["model"][field] *= 2
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is not the one that was trained there"):
        train(resumable(tmp_path, backend, resume=True))


@pytest.mark.parametrize("name", ["parameters", "optimizer"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: leaf[:1], r"norm\.weight is \[1\], not \[32\]"),
        (lambda leaf: leaf.astype(np.int32), r"norm\.weight is int32, not float32"),
    ],
)
def test_a_torch_checkpoint_that_is_unlike_the_run_is_refused(tmp_path, name, change, message):
    run = unfinished(tmp_path, "torch")
    file = run / "checkpoints" / "4" / f"{name}.safetensors"
    key = "norm.weight" if name == "parameters" else "first_moment.norm.weight"

    def damage(tensors):
        tensors[key] = change(tensors[key])

    changed(file, damage)
    with pytest.raises(UserError, match=message):
        train(resumable(tmp_path, "torch", resume=True))


def test_a_stray_directory_does_not_make_a_torch_run_a_jax_run(tmp_path):
    run = unfinished(tmp_path, "torch")
    (run / "checkpoints" / "5").mkdir()
    with pytest.raises(UserError, match=r"checkpoints/5 is damaged; delete it to continue from step 4"):
        train(resumable(tmp_path, "torch", resume=True))
    (run / "checkpoints" / "5").rmdir()
    assert train(resumable(tmp_path, "torch", resume=True)).ending == "finished"


def test_a_converted_run_is_a_start_and_nothing_to_resume(tmp_path, weights):
    convert(weights, tmp_path / "run", to="run")
    changes = {"model": None, "hidden_size": None, "num_layers": None, "steps": None, "learning_rate": None, "data": ()}
    changes |= {"batch_size": None, "max_seq_len": 512, "save_interval": 100}
    with pytest.raises(UserError, match="was converted, not trained; start from it with --init-from"):
        train(resumable(tmp_path, "torch", resume=True, **changes))


@pytest.mark.parametrize("inside", ["out", "checkpoints/9"])
def test_nothing_is_written_inside_the_source(tmp_path, weights, inside):
    convert(weights, tmp_path / "run", to="run")
    with pytest.raises(UserError, match="is inside the model that is converted"):
        convert(tmp_path / "run", tmp_path / "run" / inside, to="run")
