"""The rules that the layout keeps; the import rules themselves are import-linter's, in pyproject.toml."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("minigpt_jax", "minigpt_torch", "minigpt_bridge")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]
FRAMEWORKS = {"jax", "jaxlib", "flax", "optax", "orbax", "torch", "transformers"}
# Slow to load, and needed only when used: --help must not wait for them.
HEAVY = {*FRAMEWORKS, "grain", "matplotlib", "wandb", "tensorboard", "swanlab"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


EVERY_FILE = {module_name(path): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
FILES = {module: path for module, path in EVERY_FILE.items() if module.startswith("minigpt_jax")}


def is_framework_free(module: str) -> bool:
    """Whether the first contract's list holds the module, or the package it is in."""
    return any(module == room or module.startswith(room + ".") for room in CONTRACTS[0]["source_modules"])


def imports(module: str) -> set[str]:
    """Every module that the file of `module` imports, at any depth of its code, written out in full."""
    names = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# --- Imports ---


IMPORT_EACH = """
import importlib, sys
for module in sys.argv[1].split(","):
    before = set(sys.modules)
    importlib.import_module(module)
    heavy = {name.split(".")[0] for name in set(sys.modules) - before} & set(sys.argv[2].split(","))
    if heavy:
        print(module, "loads", *sorted(heavy))
"""


def test_importing_a_framework_free_room_loads_nothing_heavy():
    modules = ["minigpt_jax", *filter(is_framework_free, FILES)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_EACH, ",".join(modules), ",".join(HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_importing_the_torch_twin_does_not_import_jax():
    modules = [module for module in EVERY_FILE if module.startswith("minigpt_torch")]
    program = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_a_room_that_reaches_no_framework_is_listed_as_framework_free():
    needs_framework = {module for module in FILES if {name.split(".")[0] for name in imports(module)} & FRAMEWORKS}
    found = 0
    while found != len(needs_framework):
        found = len(needs_framework)
        needs_framework |= {module for module in FILES if imports(module) & needs_framework}
    packages = {module for module, path in FILES.items() if path.name == "__init__.py"}
    unlisted = {module for module in FILES.keys() - needs_framework - packages if not is_framework_free(module)}
    assert unlisted == set(), "add them to the first contract of [tool.importlinter]"


def test_only_checkpoint_imports_orbax():
    users = {module for module in FILES if "orbax" in {name.split(".")[0] for name in imports(module)}}
    assert users <= {"minigpt_jax.checkpoint"}


def test_import_linter_forbids_frameworks_torch_and_orbax():
    forbidden = [set(contract["forbidden_modules"]) for contract in CONTRACTS]
    others = {"torch", "transformers", "minigpt_torch", "minigpt_bridge"}
    assert forbidden == [FRAMEWORKS, others, FRAMEWORKS - {"torch"} | {"minigpt_bridge"}, {"orbax"}]
    assert PROJECT["tool"]["importlinter"]["include_external_packages"]


# --- Files ---


def test_no_file_of_the_library_is_longer_than_400_lines():
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in EVERY_FILE.items()}
    assert {module: length for module, length in lengths.items() if length > 400} == {}


def test_no_module_is_named_for_having_no_subject():
    parts = {part for module in EVERY_FILE for part in re.split(r"[._]", module)}
    assert not parts & {"util", "utils", "helper", "helpers", "common", "misc"}


def test_every_package_with_code_is_installed():
    packages = {module for module, path in EVERY_FILE.items() if path.name == "__init__.py"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages


def test_every_module_says_what_it_is():
    texts = {module: path.read_text(encoding="utf-8") for module, path in EVERY_FILE.items()}
    assert {
        module for module, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))
    } == set()


# --- Dependencies ---


def test_every_direct_dependency_but_cuda_is_pinned_once_to_a_plain_version():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    pinned = [pin.split("==")[0] for pin in pins]
    assert len(pinned) == len(set(pinned))
    extras = PROJECT["project"]["optional-dependencies"]
    direct = PROJECT["project"]["dependencies"] + [
        requirement for extra, requirements in extras.items() if extra != "cuda12" for requirement in requirements
    ]
    assert {re.split(r"[\[<>=!~ ;]", requirement)[0] for requirement in direct} <= set(pinned)
