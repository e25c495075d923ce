"""Compilation of every kernel to machine code in bf16 without a GPU: for an H100, and for others (proof `compile`).

This finds errors that the interpreter accepts: types of loop variables, shapes that are not powers of two, and
operations that do not exist for a type. And it reads what the compiler made of the loops that stream weights and keys.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdecode_worker.engine.kernel_class import use_compiled_kernels
from support.kernels.interpreted import kernel_modules, run_compiling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SUPPORT = Path(__file__).parents[2] / "support" / "kernels"
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "compiled-kernels.json"
RECORDED: dict[str, Any] = json.loads(RESULTS.read_text())
SHARED_BYTES = {"80": 163 * 1024, "89": 99 * 1024, "90": 227 * 1024, "100": 227 * 1024}
"""Maximum shared memory of one program by compute capability, in bytes (CUDA's documentation)."""
CYCLES_PER_KIB = {"80": 85, "89": 420, "90": 55, "100": 39}
"""Cycles in which memory brings one KiB to a multiprocessor: of an A100, L40S, H200 and B200, from the rates of
benchmarks/gpu/roofline.py (B200: nine tenths of 8 TB/s) and the clocks of their data sheets."""
SLOTS_PER_CYCLE = 4
"""Instructions that a multiprocessor issues in a cycle."""
SPILLS = {
    "attention, head dimension 96, fp16": 128,
    "attention, 256 trees": 64,
    "attention, head dimension 64": 16,
    "attention, fp32": 576,
    "bookkeeping of a chain of 5": 16,
    "sampling, bf16": 16,
}
"""Launches that spill registers somewhere, and the most bytes of a thread's stack. On an H100 only those in fp32 or
with heads of 96, and the bookkeeping, which runs once in a step as one thread block for each sequence."""
SPILLS_ON_H100 = {"attention, head dimension 96, fp16", "attention, fp32", "bookkeeping of a chain of 5"}
QUANTISED = {
    "int4, an eighth of an FFN": (0, 1),
    "int4, many outputs": (0, 1),
    "int4, fp32": (4, 1),
    "int8": (0, 1),
    "int8, fp32": (2, 0),
    "fp8": (0, 1),
    "fp8, fp16": (0, 1),
    "int4, zero points of groups": (0, 2),
    "fp8, blocks": (0, 2),
    "experts, int4": (0, 1),
    "experts, int4, a prompt": (0, 1),
}
"""Launches whose pipelined loops wait: operands that lie unswizzled in shared memory, and loads that are not copied
ahead. Those of quantised matrices wait for their scales."""
NARROW = {*QUANTISED, "attention, a token, fp8 cache"}
"""Launches that may have copies narrower than 16 bytes a thread."""
ALWAYS_NARROW = {"int4, fp32", "int8, fp32"}
"""Those that have some on every GPU."""
SLOW = {
    "80": {"attention, a token, fp8 cache": 1.1, "int4, fp32": 2.3, "int8, fp32": 2.1, "fp8, blocks": 1.1},
    "89": {},
    "90": {
        "attention, 256 trees": 1.1,
        "attention, a token, fp8 cache": 1.1,
        "int4, an eighth of an FFN": 1.1,
        "int4, zero points of groups": 1.1,
        "int4, fp32": 3.5,
        "int8": 1.1,
        "int8, fp32": 3.2,
        "fp8": 1.1,
        "fp8, fp16": 1.1,
        "fp8, blocks": 1.1,
        "experts, int4": 1.1,
    },
    "100": {
        "attention, 256 trees": 1.7,
        "attention, a token, fp8 cache": 1.3,
        "int4, an eighth of an FFN": 1.5,
        "int4, many outputs": 1.8,
        "int4, zero points of groups": 1.6,
        "int4, fp32": 4.9,
        "int8": 1.5,
        "int8, fp32": 4.5,
        "fp8": 1.5,
        "fp8, fp16": 1.5,
        "fp8, blocks": 1.5,
        "experts, int4": 1.5,
    },
}
"""Launches with a loop that is slower than memory, and the most times slower. Numbers of quantised matrices take
instructions to become those of rows; 256 trees share keys, which come from the second-level cache."""
TILES = {"80": "HMMA", "89": "HMMA", "90": "HGMMA", "100": "UTCHMMA"}
"""Instruction of matrix products with 64 rows: mma, wgmma and tcgen05."""
TILES_OF_64 = ("attention, 256 trees", "attention, head dimension 96, fp16", "int4, many outputs", "fp8, fp16")
FEW_ROWS = ("attention, a token", "attention, 64 chains", "small_linear", "small_linear, gated")


def compile_all(*words: str, paths: tuple[str, ...] = (), cache: Path | None = None) -> dict[str, Any]:
    cached = {"TRITON_CACHE_DIR": str(cache)} if cache else {}
    report: dict[str, Any] = json.loads(run_compiling(SUPPORT / "compile_all.py", *words, paths=paths, **cached))
    return report


@pytest.fixture(
    scope="module",
    params=["90", *(pytest.param(other, marks=pytest.mark.proof("compile")) for other in ("80", "89", "100"))],
)
def capability(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def launches(capability: str) -> dict[str, Any]:
    return compile_all(capability)


def test_every_kernel_compiles_and_fits(launches: dict[str, Any], capability: str) -> None:
    for name, launch in launches.items():
        assert launch["kernels"], name
        assert launch["shared_bytes"] <= SHARED_BYTES[capability], name


def test_registers_are_spilled_where_it_is_known(launches: dict[str, Any], capability: str) -> None:
    spilled = {name: launch["stack_bytes"] for name, launch in launches.items() if launch["stack_bytes"]}
    assert spilled.keys() <= (SPILLS_ON_H100 if capability == "90" else SPILLS.keys()), spilled
    assert all(size <= SPILLS[name] for name, size in spilled.items()), spilled


def test_pipelined_loops_do_not_wait(launches: dict[str, Any]) -> None:
    """Operands of matrix products are swizzled in shared memory, and everything in the loop is copied ahead of it."""
    waiting = {name: (launch["unswizzled"], launch["blocking"]) for name, launch in launches.items()}
    assert {name: counts for name, counts in waiting.items() if any(counts)} == QUANTISED
    narrow = {name for name, launch in launches.items() if launch["narrow"]}
    assert ALWAYS_NARROW <= narrow <= NARROW


def test_pipelined_loops_keep_up_with_memory(launches: dict[str, Any], capability: str) -> None:
    slow = {name: times_memory(launch, capability) for name, launch in launches.items()}
    slow = {name: times for name, times in slow.items() if times > 1}
    assert slow.keys() == SLOW[capability].keys(), slow
    assert all(times <= SLOW[capability][name] for name, times in slow.items()), slow


def test_products_of_few_rows_cost_little_beside_memory(launches: dict[str, Any], capability: str) -> None:
    """Loops over weights and keys, for one request, take at most 0.6 and 0.85 of the cycles of memory."""
    times = {name: times_memory(launches[name], capability) for name in FEW_ROWS}
    assert all(0 < times[name] <= (0.6 if name.startswith("small") else 0.85) for name in times), times


def times_memory(launch: dict[str, Any], capability: str) -> float:
    """Return the cycles of the dearest loop over those in which memory brings the same bytes."""
    cycles = max(launch["slots"] / SLOTS_PER_CYCLE, launch["shared_cycles"])
    return float(cycles / CYCLES_PER_KIB[capability])


def test_products_of_64_rows_use_the_instruction_of_the_device(launches: dict[str, Any], capability: str) -> None:
    used = {name: launches[name]["matrix"] for name in TILES_OF_64}
    assert all(names == [TILES[capability]] for names in used.values()), used


@pytest.mark.proof("compile")
def test_triton_of_the_gpu_image_makes_loops_as_cheap() -> None:
    """The hot loops of a bf16 model by Triton 3.6, which torch 2.11 wants."""
    launches = compile_all("90", "attention, a", "attention, 64", "small_linear", paths=(str(older_triton()),))
    times = {name: times_memory(launches[name], "90") for name in FEW_ROWS}
    assert all(0 < times[name] <= 0.85 for name in times), times
    for name in FEW_ROWS:
        launch = launches[name]
        assert (launch["unswizzled"], launch["blocking"], launch["narrow"], launch["stack_bytes"]) == (0, 0, 0, 0), name


def older_triton() -> Path:
    """Return a folder with Triton 3.6, installed from its hashed requirement file unless it is there."""
    root = RESULTS.parents[2]
    requirements, folder = root / "requirements" / "triton-3.6.txt", root / ".tools" / "triton-3.6"
    made_from = folder / "made-from"
    if not made_from.exists() or made_from.read_text() != requirements.read_text():
        words = ["pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", str(folder)]
        subprocess.run([str(root / ".tools/bin/uv"), *words, "--requirement", str(requirements)], check=True)
        made_from.write_text(requirements.read_text())
    return folder


@pytest.mark.parametrize("gpu", SHARED_BYTES)
def test_recorded_launches_fit_every_gpu(gpu: str) -> None:
    """The table of hack/gpu-compile has every launch, and each has the shared memory that it needs."""
    recorded = RECORDED["capabilities"][gpu]
    large = {name: launch["shared_bytes"] for name, launch in recorded.items()}
    assert {name: size for name, size in large.items() if size > SHARED_BYTES[gpu]} == {}
    assert recorded.keys() == RECORDED["capabilities"]["90"].keys()


def test_every_launch_is_recorded(launches: dict[str, Any]) -> None:
    assert launches.keys() == RECORDED["capabilities"]["90"].keys(), "run hack/gpu-compile"


def test_every_kernel_is_launched(launches: dict[str, Any]) -> None:
    """The launches cover every function named ``*_kernel`` of every module."""
    there = set()
    for module in kernel_modules():
        there |= {name for name in vars(sys.modules[module]) if name.endswith("_kernel")}
    compiled = {kernel for launch in launches.values() for kernel in launch["kernels"]}
    assert compiled == there


def test_kernels_of_an_image_are_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finds them through the files that a worker copies to the cache of its pod."""
    image, pod = tmp_path / "image", tmp_path / "pod"

    def compiled(cache: Path) -> set[str]:
        """Compile a kernel, and return the names of the files in the cache."""
        compile_all("90", "rms_norm without", cache=cache)
        return {path.name for path in cache.rglob("*") if path.is_file()}

    made = compiled(image)
    assert any(name.endswith(".cubin") for name in made)
    monkeypatch.setenv("SPECDECODE_KERNELS", str(image))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(pod))
    use_compiled_kernels()
    assert compiled(pod) == {name for name in made if name.startswith("__grp__")}
    assert compiled(tmp_path / "empty") == made
