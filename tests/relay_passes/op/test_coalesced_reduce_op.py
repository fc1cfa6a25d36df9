# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.coalesced_reduce``: types, errors, and numbers of its legalization."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from reduction_checks import (
    assert_close,
    module_of,
    numpy_dtype,
    random_data,
    reference,
    run,
)
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes.op import coalesced_reduce
from schedules.compute.coalesced_reduce import FINISH, STATE, VALUE
from schedules.errors import OpError
from schedules.workload.reduce import DTYPES, FINISHES, FLOATS, OPERATORS
from tests.selection import in_turns
from tests.targets import compile_unchecked

REFUSED = {("mean", dtype) for dtype in DTYPES if dtype not in FLOATS} | {
    (operator, "bool") for operator in ("sum", "prod", "sum_squares")
}
CASES = [case for case in itertools.product(OPERATORS, DTYPES) if case not in REFUSED]


def tensor(*shape, dtype="float32"):
    return relax.Var("data", relax.TensorType(shape, dtype))


def out_dtype(operator: str, dtype: str) -> str:
    if operator.startswith("arg"):
        return "int64"
    return "bool" if operator in ("and", "or") else dtype


def kernel(operator, shape, dtype, axes, keepdims=False):
    """The function of a legalized call."""
    call = coalesced_reduce(tensor(*shape, dtype=dtype), operator, axes, keepdims=keepdims)
    legal = relax.transform.LegalizeOps()(module_of(call, call.args[0]))
    return legal[f"coalesced_{operator}"]


def run_kernel(operator, data, dtype, axes, keepdims=False):
    """Run a legalized call into an output full of rubbish."""
    func = kernel(operator, data.shape, dtype, axes, keepdims)
    out = func.params[-1]
    kind = numpy_dtype(out_dtype(operator, dtype))
    rubbish = np.full([int(extent) for extent in out.ty.shape], 77).astype(kind)
    poisoned = tvm.runtime.tensor(rubbish)
    compile_unchecked(func.with_attr("global_symbol", "main"))(tvm.runtime.tensor(data), poisoned)
    return poisoned.numpy()


def reduced_shape(shape, axes, keepdims):
    if keepdims:
        return [1 if axis in axes else size for axis, size in enumerate(shape)]
    return [size for axis, size in enumerate(shape) if axis not in axes]


@pytest.mark.quick_cases(36)
@pytest.mark.parametrize(("operator", "dtype"), CASES)
def test_types(operator, dtype):
    n = tirx.Var("n", "int64")
    shape = (n, 3, 1, 5)
    for count in range(5):
        for axes in itertools.combinations(range(4), count):
            for keepdims in (False, True):
                call = coalesced_reduce(
                    tensor(*shape, dtype=dtype), operator, axes, keepdims=keepdims
                )
                found = relax.BlockBuilder().normalize(call).ty
                wanted = relax.TensorType(
                    reduced_shape(shape, axes, keepdims), out_dtype(operator, dtype)
                )
                tvm.ir.assert_structural_equal(found, wanted)


@pytest.mark.parametrize(("operator", "dtype"), sorted(REFUSED))
def test_types_that_an_operator_does_not_take(operator, dtype):
    with pytest.raises(OpError, match=f"{operator} of {dtype}; expected a .* type: cast it"):
        coalesced_reduce(tensor(2, 3, dtype=dtype), operator)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (None, ()),
        (1, (2, 4)),
        (-1, (2, 3)),
        ([0, -1], (3,)),
        ([np.int64(2)], (2, 3)),
        ([], (2, 3, 4)),
    ],
)
def test_axes(axes, shape):
    call = relax.BlockBuilder().normalize(coalesced_reduce(tensor(2, 3, 4), "max", axes))
    tvm.ir.assert_structural_equal(call.ty, relax.TensorType(shape, "float32"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operator": "median"}, "reduction 'median' is unknown; expected one of sum, prod"),
        ({"axes": 3}, "axis 3 is out of range; data has 3 axes"),
        ({"axes": [-4]}, "axis -4 is out of range"),
        ({"axes": [0, -3]}, r"axes \[0, -3\] name an axis twice"),
        ({"axes": [True]}, "axis is True; expected an integer"),
        ({"axes": [0.5]}, "axis is 0.5; expected an integer"),
        ({"axes": "0"}, "axis is '0'; expected an integer"),
        ({"finish": "soon"}, "finish 'soon' is unknown; expected one of auto, one_block"),
        ({"acc_dtype": "float16"}, "acc_dtype is float16; expected one of int32"),
        ({"acc_dtype": "int64"}, "acc_dtype is int64 for sum of float32; expected float32 or"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(OpError, match=f"coalesced_reduce: {message}"):
        coalesced_reduce(tensor(2, 3, 4), **arguments)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (relax.Var("d", relax.TensorType(None, "float32", ndim=2)), "expected a tensor with known"),
        (relax.Var("d", relax.TensorType((2, 3), None)), "expected a tensor with"),
        (relax.Var("d", relax.TupleType([])), "expected a tensor with known extents"),
        (tensor(2, 3, dtype="uint16"), "data has dtype uint16; expected one of float64"),
        (tensor(2, 3, dtype="float8_e4m3fn"), "data has dtype float8_e4m3fn; expected one of"),
        (
            tensor(tirx.Var("n", "int64"), tirx.Var("k", "int64")),
            r"2 reduced extents are symbolic \(n, k\); expected at most one",
        ),
    ],
)
def test_bad_data(data, message):
    with pytest.raises(OpError, match=message):
        coalesced_reduce(data)


def test_two_symbolic_parallel_extents_are_refused():
    data = tensor(tirx.Var("n", "int64"), 3, tirx.Var("k", "int64"))
    with pytest.raises(OpError, match=r"2 parallel extents are symbolic \(n, k\)"):
        coalesced_reduce(data, "sum", 1)


@pytest.mark.parametrize("operator", ["min", "max", "argmin", "argmax"])
def test_extremes_of_nothing_are_refused(operator):
    with pytest.raises(OpError, match=r"over axes \[1\] of shape \[2, 0\] has no elements and no"):
        coalesced_reduce(tensor(2, 0), operator, 1)


def test_nested_calls_are_typed_when_emitted():
    data = tensor(2, 3)
    mod = module_of(coalesced_reduce(relax.op.abs(data), "max", 0), data)
    tvm.ir.assert_structural_equal(mod["main"].ret_ty, relax.TensorType((3,), "float32"))
    with pytest.raises(OpError, match="axis 2 is out of range"):
        module_of(coalesced_reduce(relax.op.abs(data), "max", 2), data)


@I.ir_module
class Script:
    @R.function
    def main(x: R.Tensor(("n", 3), "float32")) -> R.Tensor(("n",), "float32"):
        with R.dataflow():
            gv = R.tvm_fusion.coalesced_reduce(x, operator="max", axes=[1], finish="one_block")
            R.output(gv)
        return gv


def test_script():
    call = Script["main"].body.blocks[0].bindings[0].value
    assert call.op.name == "relax.tvm_fusion.coalesced_reduce"
    assert str(call.attrs["operator"]) == "max" and str(call.attrs["finish"]) == "one_block"


def test_legalization_has_fixed_names():
    legal = relax.transform.LegalizeOps()(Script)
    assert sorted(var.name_hint for var in legal.functions) == ["coalesced_max", "main"]
    text = legal["coalesced_max"].script()
    assert all(f'T.sblock("{name}")' in text for name in (VALUE, STATE, FINISH))


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("operator", "dtype"), CASES)
@settings(max_examples=settings.default.max_examples // 10)
@given(draw=st.data())
def test_numbers(operator, dtype, draw):
    shape = draw.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), "shape")
    axes = sorted(draw.draw(st.sets(st.integers(0, len(shape) - 1)), "axes"))
    keepdims = draw.draw(st.booleans(), "keepdims")
    special = draw.draw(st.booleans(), "special")
    data = random_data(np.random.default_rng(draw.draw(st.integers(0, 99))), shape, dtype, special)
    if operator == "prod" and math.prod(shape[axis] for axis in axes) > 60:
        axes = axes[:1]  # else float32 overflows on the way
    actual = run_kernel(operator, data, dtype, axes, keepdims)
    assert_close(actual, reference(operator, data, axes, keepdims), operator)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize(("dtype", "operator"), in_turns(FLOATS, OPERATORS))
def test_special_values(operator, dtype):
    rows = [
        [-0.0, -0.0, -0.0, -0.0],
        [1.0, np.nan, np.inf, -np.inf],
        [1.0, 2.0, np.inf, -np.inf],
        [np.nan, 3.0, 3.0, np.nan],
        [3.0, 2.0, np.nan, np.nan],
        [-np.inf] * 4,
        [np.inf] * 4,
        [np.nan] * 4,
        [2.0, 3.0, 3.0, 2.0],
    ]
    data = np.array(rows).astype(numpy_dtype(dtype))
    assert_close(run_kernel(operator, data, dtype, [1]), reference(operator, data, (1,)), operator)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_negative_zeros_keep_their_sign(dtype):
    data = np.full(3, -0.0).astype(numpy_dtype(dtype))
    for operator in ("sum", "mean"):
        assert np.signbit(run_kernel(operator, data, dtype, None).astype("float64"))


@pytest.mark.parametrize(
    ("operator", "dtype"),
    in_turns(
        ["sum", "prod", "sum_squares"],
        ["int64", "int32", "int8", "uint8"],
    ),
)
def test_integers_wrap_around(operator, dtype):
    data = np.full((3, 7), np.iinfo(dtype).max - 2, dtype)
    actual = run_kernel(operator, data, dtype, [1])
    assert_close(actual, reference(operator, data, (1,)), operator)


@pytest.mark.parametrize(
    ("operator", "result"), [("sum", 2050.0), ("mean", 0.5), ("sum_squares", 2049.0)]
)
def test_float16_is_accumulated_in_float32_and_rounded_once(operator, result):
    # float16 alone would stay at 2048; 2049 is a tie, 4098 / 8196 needs more than its range.
    data = {
        "sum": np.ones(2050),
        "mean": np.full(140000, 0.5),
        "sum_squares": np.append(np.ones(2048), [0.75, 0.75]),
    }[operator].astype("float16")
    if operator == "sum_squares":
        result = np.float16(2048 + 2 * 0.75**2)
    assert run_kernel(operator, data, "float16", None) == np.float16(result)


@pytest.mark.parametrize(
    ("operator", "case"),
    in_turns(
        ["sum", "prod", "mean", "sum_squares", "and", "or"],
        [((2, 0, 3), [1]), ((0, 3), [1]), ((0,), [0])],
    ),
)
def test_no_elements(operator, case):
    shape, axes = case
    data = np.zeros(shape, "float32")
    mod = module_of(call := coalesced_reduce(tensor(*shape), operator, axes), call.args[0])
    assert_close(run(mod, data), reference(operator, data, axes), operator)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("axes", "extents"), [([0], (3, 7)), ([1], (7, 3)), ([0, 1], (5, 1))])
def test_symbolic_extents(operator, axes, extents):
    n = tirx.Var("n", "int64")
    data = tensor(n, 4)
    if axes == [1]:
        data = tensor(4, n)
    mod = module_of(coalesced_reduce(data, operator, axes), data)
    executable = compile_unchecked(relax.transform.LegalizeOps()(mod))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    for extent in extents:
        shape = (4, extent) if axes == [1] else (extent, 4)
        values = random_data(np.random.default_rng(extent), shape, "float32")
        actual = machine["main"](tvm.runtime.tensor(values)).numpy()
        assert_close(actual, reference(operator, values, axes), operator)


@pytest.mark.parametrize("acc_dtype", ["float64", None])
def test_a_wider_accumulator(acc_dtype):
    values = np.array([2.0**24, 1, 1, 1, -(2.0**24)], "float32")
    data = tensor(5)
    mod = module_of(coalesced_reduce(data, "sum", acc_dtype=acc_dtype), data)
    assert run(mod, values) == (3 if acc_dtype else 0)


@pytest.mark.parametrize("finish", FINISHES)
def test_cpus_ignore_the_finish(finish):
    data = tensor(3, 5)
    mod = module_of(coalesced_reduce(data, "max", 1, finish=finish), data)
    values = random_data(np.random.default_rng(0), (3, 5), "float32")
    np.testing.assert_array_equal(run(mod, values), values.max(axis=1))
