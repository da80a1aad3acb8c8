"""Every kernel compiles for every target without a device: what the interpreter runs is a GPU's source."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import pathlib
import re
import struct

import pytest
import torch

import kernels
from kernels import aot
from kernels.__main__ import main
from kernels.registers import register_use

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


NO_SPILLS = [n for n in VARIANTS if "mixed" not in n and "fp32" not in n]


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("name", NO_SPILLS)
def test_nothing_spills(name, target):
    """Whatever a thread holds fits into its registers: everything but the mixed and the float32 attention."""
    use = aot.compile_variant(VARIANTS[name], target).register_use
    assert 0 < use.registers <= (255 if target.startswith("cuda") else 512)
    assert use.spilled_bytes == 0


def test_registers_are_those_of_the_binary():
    """The cubin itself says how many registers it takes (attribute 0x2f of its information section)."""
    done = aot.compile_variant(VARIANTS["attention decode bf16 D64"], "cuda 90")
    (at,) = [match.end() for match in re.finditer(b"\x04\x2f\x08\x00", done.binary)]
    assert struct.unpack_from("<II", done.binary, at)[1] == done.register_use.registers


def test_an_assembler_that_says_nothing_is_quoted():
    with pytest.raises(RuntimeError, match=r"ptxas does not say how many registers the kernel takes: .+"):
        register_use("no assembly at all", aot.TARGETS["cuda 90"])


def _plain(assembly: str) -> list[str]:
    """PTX without what only says where in the source a line comes from."""
    code = assembly.split(".section")[0].split("\t.file")[0]
    return [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith((".loc", "//", "$L__tmp", ".file"))]


def _is_account(text: str) -> bool:
    return "witness" in text.lower() or "progress" in text.lower()


def _without_accounts(kernel, folder):
    """The kernel as it would be if nobody had ever thought of a witness or of progress: its source without the arguments and what depends on them."""
    tree = ast.parse(pathlib.Path(inspect.getsourcefile(kernel.fn)).read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == kernel.fn.__name__]
    function.args.args = [argument for argument in function.args.args if not _is_account(argument.arg)]
    function.args.defaults = []

    def keep(statements):
        for node in statements:
            for name in ("body", "orelse"):
                if hasattr(node, name):
                    setattr(node, name, keep(getattr(node, name)))
        return [node for node in statements if not (isinstance(node, ast.If) and ast.unparse(node.test) in ("WITNESS", "PROGRESS"))]

    function.body = keep(function.body)
    source = "import triton\nimport triton.language as tl\n\n\n" + ast.unparse(function) + "\n"
    assert not _is_account(source)
    path = folder / f"bare_{kernel.fn.__name__}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.fn.__name__)


@pytest.mark.parametrize("name", ["KV write", "page copy", "attention decode bf16 D64", "attention mixed fp16 D64 window"])
def test_accounts_that_nobody_asks_for_cost_not_one_instruction(name, tmp_path):
    variant = VARIANTS[name]
    bare = dataclasses.replace(
        variant,
        kernel=_without_accounts(variant.kernel, tmp_path),
        constants={key: value for key, value in variant.constants.items() if not _is_account(key)},
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
    assert header.split() == ["kernel", "target", "assembly", "binary", "shared", "registers", "spilled", "seconds"]
    assert [line[:53].split("  ")[0].strip() for line in lines] == ["slot mapping"] * 3 + ["KV write"] * 3
    assert all(target in line for target, line in zip([*aot.TARGETS] * 2, lines, strict=True))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_recorded_launch_compiles(dtype):
    """What a close-up shows can be compiled as it is: with its tiles, without the accounts."""
    cache = torch.zeros(4, 4, 2, 32)
    tables = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    with kernels.recorded_launches() as launches:
        kernels.paged_attention(
            torch.zeros(1, 4, 32), cache, cache.clone(), *tables, scale=1.0, progress=kernels.Progress(), backend=kernels.interpreted_like_gpu()
        )
        kernels.reshape_and_cache(cache[0], cache[0], cache, cache.clone(), torch.arange(4), backend=kernels.interpreted_like_gpu())
        kernels.copy_blocks([cache], [cache.clone()], torch.tensor([[1, 2]]), backend=kernels.interpreted_like_gpu())
        kernels.compute_slot_mapping(tables[1], torch.arange(1), tables[0], torch.zeros(4, dtype=torch.int64), block_size=4, backend="interpret")
    for launch in launches[:2] + launches[-1:]:
        done = aot.compile_variant(aot.variant_of(launch, dtype), "cuda 90")
        assert launch.kernel in done.assembly
        assert done.binary[:4] == b"\x7fELF"
