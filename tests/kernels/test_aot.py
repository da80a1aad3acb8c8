"""Every kernel compiles for every target without a device: what the interpreter runs is a GPU's source."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import pathlib

import pytest

from kernels import aot
from kernels.__main__ import main

SHARED_BYTES = {"cuda 80": 163 * 1024, "cuda 90": 227 * 1024, "hip gfx942": 64 * 1024}  # what a program may have on each
VARIANTS = {variant.name: variant for variant in aot.variants()}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """An empty compilation cache, so that nothing is taken from an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_compiles(name, target):
    done = aot.compile_variant(VARIANTS[name], target)
    assert done.binary[:4] == b"\x7fELF"  # cubin and hsaco are both ELF files
    if target.startswith("cuda"):
        assert f".target sm_{target.split()[1]}" in done.assembly
        assert "ld.local" not in done.assembly  # nothing spilt by the compiler's front half
        if "attention" in name and "fp32" not in name:
            assert "mma.sync" in done.assembly  # half precision runs on the tensor cores
            assert "cp.async" in done.assembly  # and the next tile of the cache is fetched meanwhile
    else:
        assert "gfx942" in done.assembly
    assert done.shared_bytes <= SHARED_BYTES[target]


def _plain(assembly: str) -> list[str]:
    """PTX without what only says where in the source a line comes from."""
    code = assembly.split(".section")[0].split("\t.file")[0]
    return [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith((".loc", "//", "$L__tmp", ".file"))]


def _without_witness(kernel, folder):
    """The kernel as it would be if nobody had ever thought of a witness: its source without the arguments and without what depends on them."""
    tree = ast.parse(pathlib.Path(inspect.getsourcefile(kernel.fn)).read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == kernel.fn.__name__]
    function.args.args = [argument for argument in function.args.args if "witness" not in argument.arg.lower()]
    function.args.defaults = []

    def keep(statements):
        for node in statements:
            for name in ("body", "orelse"):
                if hasattr(node, name):
                    setattr(node, name, keep(getattr(node, name)))
        return [node for node in statements if not (isinstance(node, ast.If) and ast.unparse(node.test) == "WITNESS")]

    function.body = keep(function.body)
    source = "import triton\nimport triton.language as tl\n\n\n" + ast.unparse(function) + "\n"
    assert "witness" not in source.lower()
    path = folder / f"bare_{kernel.fn.__name__}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.fn.__name__)


@pytest.mark.parametrize("name", ["KV write", "page copy", "attention decode bf16 D64", "attention mixed fp16 D64 window"])
def test_a_witness_that_nobody_asks_for_costs_not_one_instruction(name, tmp_path):
    variant = VARIANTS[name]
    bare = dataclasses.replace(
        variant,
        kernel=_without_witness(variant.kernel, tmp_path),
        constants={key: value for key, value in variant.constants.items() if "witness" not in key.lower()},
    )
    with_source, without = (_plain(aot.compile_variant(v, "cuda 90").assembly) for v in (variant, bare))
    assert with_source == without
    assert sum("st.global" in line for line in with_source) > 0


@pytest.mark.parametrize(("plain", "witnessing"), [("KV write", "KV write with witness"), ("attention decode bf16 D64", "attention decode bf16 D64 witness")])
def test_a_witness_is_written_by_the_kernel(plain, witnessing):
    """Without it the test above would hold for a flag that does nothing."""
    stores = [sum("st.global" in line for line in _plain(aot.compile_variant(VARIANTS[name], "cuda 90").assembly)) for name in (plain, witnessing)]
    assert stores[1] > stores[0]


def test_table_names_every_kernel_and_target(capsys, monkeypatch):
    monkeypatch.setattr(aot, "variants", lambda: [VARIANTS["slot mapping"], VARIANTS["KV write"]])
    assert main(["aot"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["kernel", "target", "assembly", "binary", "shared", "seconds"]
    assert [line[:53].split("  ")[0].strip() for line in lines] == ["slot mapping"] * 3 + ["KV write"] * 3
    assert all(target in line for target, line in zip([*aot.TARGETS] * 2, lines, strict=True))
