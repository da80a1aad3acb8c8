"""Every kernel compiles for every target without a device: what the interpreter runs is a GPU's source."""

from __future__ import annotations

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


def test_table_names_every_kernel_and_target(capsys, monkeypatch):
    monkeypatch.setattr(aot, "variants", lambda: [VARIANTS["slot mapping"], VARIANTS["KV write"]])
    assert main(["aot"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["kernel", "target", "assembly", "binary", "shared", "seconds"]
    assert [line[:47].split("  ")[0].strip() for line in lines] == ["slot mapping"] * 3 + ["KV write"] * 3
    assert all(target in line for target, line in zip([*aot.TARGETS] * 2, lines, strict=True))
