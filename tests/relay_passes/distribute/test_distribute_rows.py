# SPDX-License-Identifier: Apache-2.0
"""Pass ``DistributeRows``: the programs of ranks, and the rows of single ops."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes import DistributeRows, op
from relay_passes.distribute.row_rules import row_op
from relay_passes.distribute.row_stages import read_row_stages
from relay_passes.op.channels import pack, unpack
from schedules import attributes
from schedules.distribute.cost import Network, Processor
from schedules.distribute.rows.row_plan import plan_from_json
from schedules.errors import OpError

FIGURES = Network(1e-7, 1e11), Processor(1e9, 1e10)


def weight(*shape: int) -> relax.Expr:
    return relax.const(np.ones(shape, np.float32))


def function(build: Callable[..., relax.Expr], *shapes: Any, name: str = "main") -> tvm.IRModule:
    """A function of float32 tensors, whose parameters are called x0, x1, ..."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)
    ]
    builder = relax.BlockBuilder()
    with builder.function(name, params):
        with builder.dataflow():
            result = builder.emit_output(build(builder, *params))
        builder.emit_func_output(result)
    return builder.get()


def two_convolutions(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    first = builder.emit(op.conv2d(x, weight(4, 3, 3, 3), padding=[1, 1, 1, 1]))
    return op.conv2d(first, weight(4, 4, 3, 3), padding=[1, 1, 1, 1])


def received(
    builder: relax.BlockBuilder, number: int, own: relax.Var, rows: int, *last: relax.Var
) -> relax.Var:
    shape = [1, 4, rows, 8] if rows else [1]
    needs = relax.TensorType(shape, "float32" if rows else "uint8")
    arguments = relax.Tuple([relax.prim_value(number), own, *last])
    call = relax.op.call_dps_packed("tvm_fusion.exchange_rows", arguments, needs)
    return builder.emit(call)


def expected_part(rank: int) -> tvm.IRModule:
    """Rank 0 and 1 of 2: rows 0:4 and 4:8 with one row of the other."""
    padding = [1, 1, 0, 1] if rank == 0 else [0, 1, 1, 1]

    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        first = builder.emit(op.conv2d(x, weight(4, 3, 3, 3), padding=padding))
        halo = received(builder, 0, first, 5)
        second = builder.emit(op.conv2d(halo, weight(4, 4, 3, 3), padding=padding))
        return relax.Tuple([received(builder, 1, second, 8 if rank == 0 else 0, halo)])

    return function(build, (1, 3, 5, 8), name=f"part_{rank}")


def test_two_convolutions_on_two_ranks() -> None:
    before = function(two_convolutions, (1, 3, 8, 8))
    after = DistributeRows(2, *FIGURES, "always")(before)
    for rank in range(2):
        name = f"part_{rank}"
        tvm.ir.assert_structural_equal(
            after[name].without_attr("global_symbol"),
            expected_part(rank)[name].without_attr("global_symbol"),
            map_free_vars=True,
        )
    assert "main" not in [name.name_hint for name in after.get_global_vars()]
    plan = plan_from_json(json.loads(str(after.attrs[attributes.RANK_PLAN])))
    assert [part.inputs for part in plan.parts] == [((0, 5),), ((3, 8),)]
    assert [(e.shape, e.own, e.held) for e in plan.exchanges] == [
        ((1, 4, 8, 8), ((0, 4), (4, 8)), ((0, 5), (3, 8))),
        ((1, 4, 8, 8), ((0, 4), (4, 8)), ((0, 8), (0, 0))),
    ]
    tvm.ir.assert_structural_equal(DistributeRows(2, *FIGURES)(after), after)


def test_equal_ranks_share_a_function() -> None:
    after = DistributeRows(5, *FIGURES, "always")(function(two_convolutions, (1, 3, 20, 8)))
    plan = plan_from_json(json.loads(str(after.attrs[attributes.RANK_PLAN])))
    names = [part.function for part in plan.parts]
    assert names[1] == names[2] == names[3] and len(plan.functions) == 3


def test_a_result_that_is_read_again() -> None:
    """The residual takes the rank's own rows, the convolution those with a halo."""

    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        first = builder.emit(op.conv2d(x, weight(4, 3, 1, 1)))
        return op.conv2d(first, weight(4, 4, 3, 3), None, first, padding=[1, 1, 1, 1])

    after = DistributeRows(2, *FIGURES, "always")(function(build, (1, 3, 8, 8)))
    text = after["part_0"].script()
    assert "strided_slice" not in text and text.count("exchange_rows") == 2
    once = DistributeRows(2, *FIGURES, "once")(function(build, (1, 3, 8, 8)))
    text = once["part_0"].script()
    assert text.count("strided_slice") == 1 and text.count("exchange_rows") == 1


def test_columns_of_a_product_on_two_ranks() -> None:
    """All of the matrix is made on both; each has 128 of 256 columns of the weights."""

    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        image = builder.emit(op.conv2d(x, weight(4, 3, 3, 3)))
        flat = builder.emit(relax.op.reshape(image, [1, 4 * 36]))
        return relax.op.matmul(flat, weight(144, 256))

    figures = Network(1e-9, 1e15), Processor(1e15, 1e15, only_read=1e6)
    after = DistributeRows(2, *figures)(function(build, (1, 3, 8, 8)))
    plan = plan_from_json(json.loads(str(after.attrs[attributes.RANK_PLAN])))
    last = plan.exchanges[-1]
    assert last.by_channels and last.own == ((0, 128), (128, 256))
    assert last.held == ((0, 1), (0, 0)) and plan.segments[-1].bytes == 128 * 4
    for name in plan.functions:
        assert 'R.Tensor((1, 128), dtype="float32") = R.matmul' in after[name].script()


def call(build: Callable[..., relax.Expr], *shapes: Any) -> relax.Call:
    """The only call of a function."""
    [block] = function(lambda _, *params: build(*params), *shapes)["main"].body.blocks
    return block.bindings[0].value


nn, image = relax.op.nn, relax.op.image


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x: relax.op.mean(x, [2, 3], True), [(1, 4, 8, 8)]),
        (lambda x: relax.op.reshape(x, [1, 4, 64]), [(1, 4, 8, 8)]),
        (lambda x, y: relax.op.concat([x, y], 2), [(1, 4, 8, 8), (1, 4, 3, 8)]),
        (lambda x: relax.op.nn.relu(x), [(5, 8)]),
        (lambda x, y: relax.op.add(x, y), [(1, 4, 8, 8), (8, 1)]),
        (lambda x: relax.op.add(x, weight(1, 1, 8, 8)), [(1, 4, 8, 8)]),
        (lambda x: image.resize2d(x, (12, 16)), [(1, 4, 8, 8)]),
        (lambda x: image.resize2d(x, (24, 16)), [(1, 4, 8, 8)]),
        (
            lambda x: image.resize2d(x, (16, 16), coordinate_transformation_mode="align_corners"),
            [(1, 4, 8, 8)],
        ),
        (
            lambda x: nn.avg_pool2d(x, 3, 2, ceil_mode=True, count_include_pad=True),
            [(1, 4, 8, 8)],
        ),
        (lambda x: nn.max_pool2d(x, 3, layout="NHWC"), [(1, 8, 8, 4)]),
        (lambda x: op.conv2d(x, weight(4, 4, 1, 1), padding=[1, 0, 1, 0]), [(1, 4, 8, 8)]),
        (lambda x: relax.op.nn.softmax(x, 2), [(1, 4, 8, 8)]),
    ],
)
def test_calls_that_are_not_split(build: Callable[..., relax.Expr], shapes: Any) -> None:
    assert row_op(call(build, *shapes)) is None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x: op.conv2d(x, weight(4, 4, 3, 2), strides=[2, 1]), [(1, 4, 9, 8)]),
        (
            lambda x: op.conv2d(x, weight(4, 4, 3, 3), padding=[2, 2, 1, 2], dilation=[2, 2]),
            [(1, 4, 9, 8)],
        ),
        (
            lambda x: op.fused_conv2d(
                x,
                weight(4, 1, 3, 3),
                None,
                weight(4, 4, 3, 3),
                None,
                padding1=[1, 1, 1, 1],
                groups1=4,
                strides1=[2, 2],
                padding2=[1, 1, 1, 1],
            ),
            [(1, 4, 19, 8)],
        ),
        (lambda x: nn.max_pool2d(x, 3, 2, [1, 1, 1, 1], ceil_mode=True), [(1, 4, 10, 9)]),
        (lambda x: nn.avg_pool2d(x, 3, 1, [1, 1, 1, 1]), [(1, 4, 10, 9)]),
        (
            lambda x: nn.avg_pool2d(x, 3, 1, [1, 1, 1, 1], count_include_pad=True),
            [(1, 4, 10, 9)],
        ),
        (lambda x, y: relax.op.multiply(x, y), [(1, 4, 8, 8), (1, 4, 1, 1)]),
        (lambda x, y: relax.op.add(x, y), [(1, 4, 8, 8), (1, 4, 8, 8)]),
        (lambda x, y: relax.op.concat([x, y], 1), [(1, 4, 8, 8), (1, 2, 8, 8)]),
        (lambda x: nn.pad(x, [0, 0, 0, 0, 2, 1, 1, 0], pad_value=7.0), [(1, 4, 8, 8)]),
        (lambda x: nn.pad(x, [0, 0, 0, 0, 5, 1, 0, 0], pad_value=7.0), [(1, 4, 2, 8)]),
        (lambda x: nn.pad(x, [0, 0, 0, 0, 1, 6, 0, 0], pad_value=7.0), [(1, 4, 2, 8)]),
        (lambda x: pack(x, 4), [(1, 6, 8, 8)]),
        (lambda x: unpack(x, 6), [(1, 2, 8, 8, 4)]),
        (lambda x: image.resize2d(x, (16, 16)), [(1, 4, 8, 8)]),
        (
            lambda x: image.resize2d(
                x,
                (32, 16),
                method="nearest_neighbor",
                coordinate_transformation_mode="asymmetric",
                rounding_method="floor",
            ),
            [(1, 4, 8, 8)],
        ),
    ],
)
def test_parts_of_a_call_make_its_result(
    build: Callable[..., relax.Expr], shapes: Any, run_module: Callable[..., np.ndarray]
) -> None:
    """Two parts, cut anywhere, of operands of which they get no row more than they read."""
    mod = function(lambda _, *params: build(*params), *shapes)
    arrays = [np.random.default_rng(1).standard_normal(s).astype("float32") for s in shapes]
    whole = run_module(mod, *arrays)
    stages = read_row_stages(mod["main"])
    bound = next(one for one in stages if one.rows is not None)
    assert bound.rows is not None
    rebuild, value = bound.rows.rebuild, bound.value
    cut = whole.shape[2] // 2 - 1
    parts = []
    for begin, end in ((0, cut), (cut, whole.shape[2])):
        given = []
        for array, maps in zip(arrays, bound.rows.reads, strict=False):
            low, high = np.array([begin]), np.array([end])
            for one in maps or ():
                low, high = one.read(low, high)
            given.append(array if maps is None else array[:, :, int(low[0]) : int(high[0])])

        def part(_: Any, *params: relax.Var, b: int = begin, e: int = end) -> relax.Expr:
            extra = [o for o in value.args if not isinstance(o, relax.Var | relax.Tuple)]
            return rebuild([*params, *extra], b, e)

        parts.append(run_module(function(part, *[g.shape for g in given]), *given))
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), whole)


def test_rows_of_bytes() -> None:
    types = [((1, 4, 9, 8), "uint8"), ((8, 4, 3, 3), "int8"), ((8,), "float32"), ((8,), "float32")]
    operands = [relax.Var("x", relax.TensorType(*ty)) for ty in types]
    made = relax.BlockBuilder().normalize(op.quantized_conv2d(*operands, padding=[1, 1, 1, 1]))
    rows = row_op(made)
    assert rows is not None and rows.reads[1:] == (None,) * 3
    part = rows.rebuild(
        [relax.Var("x", relax.TensorType((1, 4, 5, 8), "uint8")), *operands[1:]], 0, 4
    )
    assert list(part.attrs["padding"]) == [1, 1, 0, 1]
    assert list(relax.BlockBuilder().normalize(part).ty.shape.values) == [1, 8, 4, 8]


def test_sizes_only_known_at_run_time() -> None:
    batch = tvm.tirx.Var("n", "int64")
    with pytest.raises(OpError, match="'x0' is .* whose size is only known at run time"):
        DistributeRows(2, *FIGURES)(function(two_convolutions, (batch, 3, 8, 8)))


def test_a_model_without_images() -> None:
    with pytest.raises(OpError, match=r"'gv' \(matmul\) needs all rows"):
        DistributeRows(2, *FIGURES)(function(lambda b, x: relax.op.matmul(x, weight(8, 8)), (5, 8)))
