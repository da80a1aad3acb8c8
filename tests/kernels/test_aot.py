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
from kernels.registers import RegisterUse, register_use

SHARED_BYTES = {"cuda 80": 163 * 1024, "cuda 90": 227 * 1024, "hip gfx942": 64 * 1024}  # what a program may have on each
VARIANTS = {variant.name: variant for variant in aot.variants()}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """An empty compilation cache, so that nothing is taken from an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("name", [variant.name for variant in aot.variants()])
def test_compiles_without_spilling(name, target):
    """And whatever a thread holds fits into its registers."""
    (variant,) = (variant for variant in aot.variants(target) if variant.name == name)
    done = aot.compile_variant(variant, target)
    assert done.binary[:4] == b"\x7fELF"  # cubin and hsaco are both ELF files
    if target.startswith("cuda"):
        assert f".target sm_{target.split()[1]}" in done.assembly
        assert "ld.local" not in done.assembly  # nothing spilt by the compiler's front half
        if "attention" in name:
            # Half precision runs on the tensor cores, on Hopper with its own instruction where there are 64 rows.
            assert ("wgmma.mma_async" in done.assembly) == ("mixed" in name and target == "cuda 90")
            assert ("mma.sync" in done.assembly) == ("fp32" not in name and not ("mixed" in name and target == "cuda 90"))
    else:
        assert "gfx942" in done.assembly
        assert ("v_mfma_f32" in done.assembly) == ("attention" in name)
    assert done.shared_bytes <= SHARED_BYTES[target]
    use = done.register_use
    assert 0 < use.registers <= (255 if target.startswith("cuda") else 512)
    assert use.spilled_bytes == 0


@pytest.mark.parametrize("target", ["cuda 80", "cuda 90"])
def test_memory_is_read_16_bytes_at_a_time(target):
    """By every thread of what moves keys and values, and by attention's asynchronous copies of them into shared memory; a witness and tables are narrower."""
    for name in ("KV write", "page copy", "page gather", "page scatter"):
        assembly = aot.compile_variant(VARIANTS[name], target).assembly
        both = 2 * (2 if name.startswith("page") else 1)  # keys and values, and of a page 32 bytes each
        assert len(re.findall(r"ld\.global\.v4\.b32", assembly)) == len(re.findall(r"st\.global\.v4\.b32", assembly)) == both
    for name in ("attention decode bf16 D64", "attention decode bf16 D128 split", "attention decode fp32 D64", "attention mixed bf16 D128"):
        assembly = aot.compile_variant(VARIANTS[name], target).assembly
        copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+),", assembly)
        assert copies.count("0x10") >= 2
        assert set(copies) <= {"0x10", "0x4"}  # 4 bytes: entries of the block table
        assert "fp32" in name or "ld.global.v4.b32" in assembly  # the query


def test_the_next_tiles_are_under_way():
    """Decoding in half precision keeps two tiles of keys and two of values: 2 * 2 * 64 keys of 128 numbers of 2 bytes, and some more for query and weights."""
    for name, keys, head_dim in (("attention decode bf16 D64", 128, 64), ("attention decode bf16 D128 split", 64, 128)):
        assert 2 * 2 * keys * head_dim * 2 <= aot.compile_variant(VARIANTS[name], "cuda 90").shared_bytes <= 114 * 1024  # two programs share 228 KiB


WORST = [
    ("cuda 80", "attention mixed bf16 D256 window 512"),
    ("cuda 80", "attention mixed fp32 D256 witness progress"),
    ("cuda 90", "attention mixed fp16 D256 window 512"),
    ("cuda 90", "attention mixed fp32 D80 witness progress"),
    ("cuda 90", "attention decode fp32 D256 split witness progress"),
    ("hip gfx942", "attention decode fp32 D256 window 512 witness progress"),
]
"""Of the 540 default configurations that `python -m kernels aot --every` compiles, those with most registers, and those that spilled with other tiles."""


@pytest.mark.parametrize(("target", "name"), WORST)
def test_no_default_configuration_spills(target, name):
    (variant,) = (variant for variant in aot.every_attention(target) if variant.name == name)
    assert aot.compile_variant(variant, target).register_use.spilled_bytes == 0


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
    function.decorator_list = [ast.parse("triton.jit").body[0].value]  # what it is told not to specialise for says nothing where all is fixed
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


@pytest.mark.parametrize("name", ["slot mapping", "KV write", "page copy", "attention decode bf16 D64", "attention mixed fp16 D64 window 512"])
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


@pytest.mark.parametrize(
    ("plain", "witnessing"),
    [
        ("slot mapping", "slot mapping with witness"),
        ("KV write", "KV write with witness"),
        ("attention decode bf16 D64", "attention decode bf16 D64 witness progress"),
    ],
)
def test_a_witness_is_written_by_the_kernel(plain, witnessing):
    """Without it the test above would hold for a flag that does nothing."""
    stores = [sum("st.global" in line for line in _plain(aot.compile_variant(VARIANTS[name], "cuda 90").assembly)) for name in (plain, witnessing)]
    assert stores[1] > stores[0]


def test_table_names_every_kernel_and_target(capsys, monkeypatch):
    monkeypatch.setattr(aot, "variants", lambda target: [VARIANTS["slot mapping"], VARIANTS["KV write"]])
    assert main(["aot"]) == 0
    header, *lines, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["kernel", "target", "assembly", "binary", "shared", "registers", "spilled", "seconds"]
    assert [line[:56].strip() for line in lines] == ["slot mapping", "KV write"] * 3
    assert [line[57:69].strip() for line in lines] == [target for target in aot.TARGETS for _ in range(2)]
    assert last == "6 compiled; nothing spills."


def test_table_says_what_spills(capsys, monkeypatch):
    monkeypatch.setattr(aot, "variants", lambda target: [VARIANTS["slot mapping"]] * (target == "cuda 80"))
    monkeypatch.setattr(aot.Compiled, "register_use", property(lambda done: RegisterUse(255, 4)))
    assert main(["aot"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 compiled; what spills: slot mapping on cuda 80."


def test_every_configuration_is_named_once():
    """3 dtypes, 5 head sizes, decode, split and mixed, with and without window, telling or not."""
    for target in aot.TARGETS:
        assert len({variant.name for variant in aot.every_attention(target)}) == 3 * 5 * 3 * 2 * 2


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
