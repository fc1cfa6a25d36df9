# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: threads, no slow path, hypothesis, a check of each pass's result."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# TVM reads this once, at its first parallel kernel; later it cannot be changed.
os.environ.setdefault("TVM_NUM_THREADS", "2")
os.environ["TVM_FUSION_CACHE"] = "0"  # tests are to compile
# This, too. After a parallel kernel each idle worker of a pool would spin for 0.2 s, and every
# thread that calls one has a pool: a core beside the tests would do nothing else.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
# A schedule rule that fails is an error, in processes that the tests start, too.
os.environ["TVM_FUSION_STRICT"] = "1"

import pytest
import tvm
import xdist
from hypothesis import HealthCheck, settings
from tvm.ir.transform import PassInfo
from tvm.target import Target, codegen

import relay_passes
from schedules.cpu.core import machine
from tests.selection import mark_slow_cases
from tvm_fusion.compiler import pipeline, targets

# LLVM's name of the CPU that this one is to pass for; it keeps its instructions.
if _name := os.environ.get("TVM_FUSION_TEST_CPU"):
    codegen.llvm_get_system_cpu = lambda: _name
    _paths = [str(Path(__file__).with_name("renamed_cpu")), os.environ.get("PYTHONPATH", "")]
    # Processes that it starts get it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))

# TVM's parser asks at each function for the modules of the whole stack, and for those of Python's
# frozen files, of what a worker begins with, and of files that are no module, Python would search
# all modules every time.
for _name in ("runpy", "importlib._bootstrap", "importlib._bootstrap_external"):
    inspect.modulesbyfile[f"<frozen {_name}>"] = _name
for _name in ("<string>", str(Path(xdist.__file__).with_name("remote.py"))):
    inspect.modulesbyfile[_name] = "__main__"

# Examples of a property; where each is compiled, a share of them. --hypothesis-profile chooses.
for profile, examples in (("quick", 12), ("thorough", 100)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
        derandomize="CI" in os.environ,  # a change is judged by examples that do not change
    )
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of tests of whose cases few are quick."""
    config.addinivalue_line(
        "markers", "quick_cases(count or ids): the other cases are slow, see tests/selection.py"
    )


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark as slow all but the chosen cases of a test."""
    made = yield
    if isinstance(made, list):
        mark_slow_cases(made)
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests, so that no worker is left with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what lives to the end: modules, tests, TVM's ops."""
    gc.collect()
    gc.freeze()


@tvm.instrument.pass_instrument
class WellFormed:
    """Checks the Relax functions that a pass of ours leaves, or one that works with our functions.

    A check after every pass of TVM would take a twentieth of the time of all tests.
    """

    def run_after_pass(self, mod: tvm.IRModule, info: PassInfo) -> None:
        if info.name in _CHECKED:
            assert tvm.relax.analysis.check_well_formed(mod), f"{info.name} left:\n{mod}"


_CHECKED = frozenset([*relay_passes.__all__, "LegalizeOps", "FuseOps", "FuseTIR"])


@pytest.fixture(autouse=True)
def _well_formed_modules() -> Iterator[None]:
    """Check after the passes of every test that the module is still well formed."""
    context = tvm.transform.PassContext.current()
    before = list(context.instruments or [])
    context.override_instruments([*before, WellFormed()])
    yield
    context.override_instruments(before)


@pytest.fixture
def rename_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Give this CPU the name of another one, and the features of that: no code of it can run."""

    def rename(name: str) -> None:
        monkeypatch.setattr(codegen, "llvm_get_system_cpu", lambda: name)
        monkeypatch.setattr(targets, "_host_mattr", list)

    yield rename
    machine._from_text.cache_clear()  # which holds the caches of a CPU of this name


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> list[tvm.IRModule]:
    """The modules that ``tvm_fusion.compile`` generates code of, in order."""
    modules: list[tvm.IRModule] = []
    build_apart = pipeline.build_apart

    def keep(mod: tvm.IRModule, target: Target, *args: Any, **options: Any) -> Any:
        modules.append(mod)
        return build_apart(mod, target, *args, **options)

    monkeypatch.setattr(pipeline, "build_apart", keep)
    return modules
