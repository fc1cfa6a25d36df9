# SPDX-License-Identifier: Apache-2.0
"""Pass ``ShortenNames``: long names are cut, short and public ones stay, and calls follow."""

from __future__ import annotations

import numpy as np
import tvm
from op_calls import function_names
from reduction_checks import run
from tvm import relax

import relay_passes
from relay_passes import ShortenNames
from relay_passes.program.share_kernels import LONGEST


def chains() -> tvm.IRModule:
    """Two functions with long names that differ at the end only, and one with a short name."""
    x = relax.Var("x", relax.TensorType((3, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            results = []
            for last in (relax.op.exp, relax.op.negative):
                value = x
                for _ in range(30):
                    value = builder.emit(relax.op.add(value, relax.const(1.0)))
                results.append(builder.emit(last(value)))
            total = builder.emit(relax.op.sum(x))
            result = builder.emit_output(relax.Tuple([*results, total]))
        builder.emit_func_output(result)
    lower = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    return tvm.transform.Sequential(lower)(builder.get())


def test_pass_has_the_name_of_its_file_and_is_exported() -> None:
    assert ShortenNames().info.name == "ShortenNames"
    assert relay_passes.ShortenNames is ShortenNames
    assert ShortenNames.__module__ == "relay_passes.program.share_kernels"


def test_long_names_are_cut_and_calls_follow() -> None:
    mod = chains()
    functions = dict(mod.functions_items())
    names = function_names(mod)
    assert max(map(len, names)) > LONGEST and "sum" in names
    short = ShortenNames()(mod)
    assert dict(mod.functions_items()) == functions
    tvm.ir.assert_structural_equal(ShortenNames()(short), short)
    cut = function_names(short)
    assert len(cut) == len(names) and "sum" in cut
    assert all(len(name) <= LONGEST for name in cut)
    long = [name for name in names if len(name) > LONGEST]
    assert all(any(name[:80] == other[:80] for other in cut) for name in long)
    data = np.random.default_rng(0).standard_normal((3, 4), dtype=np.float32)
    for actual, expected in zip(run(short, data), run(mod, data), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_public_functions_keep_their_names() -> None:
    mod = chains()
    for name, func in mod.functions_items():
        if len(name.name_hint) > LONGEST:
            mod.update_func(name, func.with_attr("global_symbol", name.name_hint))
    assert ShortenNames()(mod).same_as(mod)


def test_a_module_of_short_names_stays_the_same() -> None:
    mod = tvm.IRModule({})
    assert ShortenNames()(mod).same_as(mod)
