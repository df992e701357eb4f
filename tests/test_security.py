"""Checks the package's syntax trees: it never runs bytes or text from outside as code, and never listens at every
address.

`violations` has the patterns. The snippets below test which code the patterns find and which they do not find.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "asyncrl"

# Dotted names that the package may not use at all, because each runs bytes or text as code.
_FORBIDDEN_NAMES = frozenset(
    {
        "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load",
        "dill.loads", "marshal.load", "marshal.loads", "shelve.open", "ray.cloudpickle.load", "ray.cloudpickle.loads",
        "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader", "yaml.UnsafeLoader",
        "eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen", "subprocess.getoutput",
        "subprocess.getstatusoutput", "joblib.load", "pandas.read_pickle", "torch.serialization.load",
    }
)  # fmt: skip
_FORBIDDEN_TEXTS = frozenset({"0.0.0.0", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"})
_EVERY_ADDRESS = re.compile(r"\w+://(0\.0\.0\.0|\[::\]|\*)(:|$)|0\.0\.0\.0:|\[::\]:")
_FORBIDDEN_SWITCHES = frozenset({"trust_remote_code", "shell", "allow_pickle"})
# Methods of transformers that ask on the terminal whether they may run code of a model, unless the argument is given.
_LOADERS = frozenset({"from_pretrained", "from_config"})
_LISTENERS = frozenset({"bind", "create_server", "HTTPServer", "ThreadingHTTPServer", "TCPServer"})


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, description) of everything in `tree` that the package may not contain."""
    origins = _imported_names(tree)
    safe_loads = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _loads_weights_only(node)}
    without_code = {
        id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _runs_no_code(node, origins)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _dotted(node, origins)
            if name in _FORBIDDEN_NAMES or (name == "torch.load" and id(node) not in safe_loads):
                yield node.lineno, name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in _FORBIDDEN_NAMES:
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and _opens_a_door(node.value):
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Call) and _listens_to_everyone(node):
            yield node.lineno, "a listener at every address"
        if isinstance(node, ast.Attribute) and node.attr in _LOADERS and id(node) not in without_code:
            yield node.lineno, f"{node.attr} without trust_remote_code=False"
        for name, value in _settings(node):
            if name in _FORBIDDEN_SWITCHES and not (isinstance(value, ast.Constant) and value.value is False):
                yield value.lineno, f"{name} that is not False"


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """Maps each imported local name to the dotted name that it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _dotted(node: ast.expr, origins: dict[str, str]) -> str:
    """Returns the dotted name of `a.b.c` with `a` resolved through the imports; "" if it is not a chain of names."""
    if isinstance(node, ast.Name):
        return origins.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, origins)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _loads_weights_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def _runs_no_code(call: ast.Call, origins: dict[str, str]) -> bool:
    """Returns whether a call that may load a model does not ask for code of the model. peft loads none."""
    return _dotted(call.func, origins).startswith("peft.") or any(
        name == "trust_remote_code" for keyword in call.keywords for name, _ in _settings(keyword)
    )


def _opens_a_door(value: object) -> bool:
    """Returns whether `value` is a vLLM variable that must stay unset, or the address of every network.

    Only whole strings match, so that docstrings and messages may mention them.
    """
    return isinstance(value, str) and (value in _FORBIDDEN_TEXTS or _EVERY_ADDRESS.match(value) is not None)


def _listens_to_everyone(call: ast.Call) -> bool:
    """Returns whether a socket or server is created for every address. An empty host means every address."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in _LISTENERS or not call.args or not isinstance(call.args[0], ast.Tuple) or not call.args[0].elts:
        return False
    host = call.args[0].elts[0]
    return isinstance(host, ast.Constant) and host.value in ("", "::", "0", "*")


def _settings(node: ast.AST) -> Iterator[tuple[str | None, ast.expr]]:
    """Yields (name, value) for each name that `node` sets: keyword arguments, dictionary keys, variables, defaults."""
    if isinstance(node, ast.keyword):
        yield node.arg, node.value
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        for argument, default in zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True):
            yield argument.arg, default
        for argument, keyword_default in zip(node.kwonlyargs, node.kw_defaults, strict=True):
            if keyword_default is not None:
                yield argument.arg, keyword_default


@pytest.mark.slow
def test_the_package_runs_no_foreign_code_and_listens_to_nobody_by_default() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"there are no Python files under {PACKAGE}, so nothing would be checked"
    found = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {what}"
        for file in files
        for line, what in violations(ast.parse(file.read_text(encoding="utf-8"), filename=str(file)))
    ]
    assert found == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle\npickle.loads(b)",
        "import pickle as p\np.loads(b)",
        "from pickle import loads",
        "from pickle import loads as harmless\nharmless(b)",
        "import pickle\nload = pickle.loads",
        "import pickle\nmap(pickle.loads, frames)",
        "from ray import cloudpickle\ncloudpickle.loads(b)",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=flag)",
        "from torch import load\nload(f)",
        "import torch\nread = torch.load",
        "import yaml\nyaml.load(t, Loader=yaml.SafeLoader)",
        "import yaml\nyaml.unsafe_load(t)",
        "eval(t)",
        "exec(t)",
        "import builtins\nbuiltins.exec(t)",
        "import os\nos.system(t)",
        "import subprocess\nsubprocess.run(t, shell=True)",
        "import subprocess\nsubprocess.run(t, shell=flag)",
        "Model.from_pretrained(path, trust_remote_code=True)",
        "Model.from_pretrained(path)",
        "AutoModel.from_config(config, dtype=dtype)",
        "build = AutoModel.from_config",
        "options = {'trust_remote_code': True}",
        "def load(path, trust_remote_code=True): ...",
        "def load(path, *, trust_remote_code=True): ...",
        "class C:\n    trust_remote_code: bool = True",
        "host: str = '0.0.0.0'",
        "def serve(host='0.0.0.0'): ...",
        "serve(host='0.0.0.0')",
        "address = 'tcp://0.0.0.0:5555'",
        "address = f'tcp://[::]:{port}'",
        "listen('0.0.0.0:80')",
        "socket.bind(('', 80))",
        "socket.create_server(('', 0))",
        "ThreadingHTTPServer(('::', 80), Handler)",
        "import numpy\nnumpy.load(f, allow_pickle=True)",
        "import pandas\npandas.read_pickle(f)",
        "environment['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'",
        "environment = {'VLLM_SERVER_DEV_MODE': '1'}",
    ],
)
def test_forbidden_snippets_are_found(snippet: str) -> None:
    assert list(violations(ast.parse(snippet)))


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch\ntorch.load(f, weights_only=True, mmap=True)",
        "import yaml\nyaml.safe_load(t)",
        "model.eval()",
        "class Config:\n    eval: EvalSection = EvalSection()",
        "import ast\nast.literal_eval(t)",
        "Model.from_pretrained(path, trust_remote_code=False)",
        "from peft import PeftModel\nPeftModel.from_pretrained(model, path)",
        "import subprocess\nsubprocess.run([program, argument], shell=False)",
        "host = '127.0.0.1'",
        '"""Never bind 0.0.0.0, never pickle.loads."""',
        "import json\njson.loads(t)",
        "socket.create_server((host, 0))",
        "socket.create_server(('127.0.0.1', 0))",
        "import numpy\nnumpy.load(f, allow_pickle=False)",
        "import pickle\npickle.dumps(value)",
        "from safetensors.torch import load\nload(b)",
    ],
)
def test_harmless_snippets_pass(snippet: str) -> None:
    assert not list(violations(ast.parse(snippet)))
