# SPDX-License-Identifier: Apache-2.0
"""Ops between two convolutions: which stay packed, and that the numbers stay the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from relay_passes.layout.pack_layout import PackLayout
from relay_passes.op import channel_shuffle, conv2d
from relay_passes.op.elementwise import hardswish
from tests.targets import compile_unchecked

nn, op = relax.op.nn, relax.op
RNG = np.random.default_rng(7)
PIXELS = (6, 7)
TARGET = tvm.target.Target(
    {"kind": "llvm", "opt-level": 0}
)  # numbers do not depend on it, compile time does


def const(*shape: int, scale: float = 1.0):
    return relax.const((RNG.standard_normal(shape) * scale).astype("float32"))


def scalar(value: float):
    return relax.const(value, "float32")


def build(middle, channels: int, last: bool = True) -> tvm.IRModule:
    """Image -> 3x3 convolution to ``channels`` -> ``middle`` [-> 1x1 convolution] -> result.

    ``middle`` gets the builder and the convolution's result. Its result, or that of the last
    convolution, is the function's.
    """
    image = relax.Var("image", relax.TensorType((2, 3, *PIXELS), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [image]):
        with builder.dataflow():
            first = conv2d(image, const(channels, 3, 3, 3), const(channels), padding=[1, 1, 1, 1])
            result = builder.emit(middle(builder, builder.emit(first)))
            if last:
                inputs = int(result.ty.shape.values[1])
                weight, bias = const(5, inputs, 1, 1, scale=inputs**-0.5), const(5)
                result = builder.emit(conv2d(result, weight, bias))
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder.get()


def calls(mod: tvm.IRModule) -> Counter[str]:
    """Number of calls of each op."""
    names: Counter[str] = Counter()

    def look(expr) -> None:
        if isinstance(expr, relax.Call):
            names[expr.op.name.removeprefix("relax.").removeprefix("tvm_fusion.")] += 1

    relax.analysis.post_order_visit(mod["main"], look)
    return names


def check(mod: tvm.IRModule, block: int) -> Counter[str]:
    """Pack a module, check that a second time changes nothing, and count the calls."""
    after = PackLayout(block=block)(mod)
    tvm.ir.assert_structural_equal(PackLayout(block=block)(after), after)
    return calls(after)


def check_numbers(cases: dict[str, tvm.IRModule], block: int) -> None:
    """Every case gives the same numbers packed; all of them are compiled as one module."""
    functions = {}
    for index, mod in enumerate(cases.values()):
        packed = PackLayout(block=block)(mod)
        for prefix, main in (("plain", mod["main"]), ("packed", packed["main"])):
            name = f"{prefix}{index}"
            functions[name] = copy_with_new_vars(main).with_attr("global_symbol", name)
    with tvm.transform.PassContext():  # TVM's own passes need no checks of ours
        executable = compile_unchecked(tvm.IRModule(functions), TARGET)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    data = tvm.runtime.tensor(RNG.standard_normal((2, 3, *PIXELS)).astype("float32"))
    for index, name in enumerate(cases):
        expected = machine[f"plain{index}"](data).numpy()
        assert np.isfinite(expected).all(), name
        found = machine[f"packed{index}"](data).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def emit_all(builder, *exprs):
    return [builder.emit(expr) for expr in exprs]


STAY_PACKED = {
    "relu": lambda b, x: nn.relu(x),
    "relu6": lambda b, x: nn.relu6(x),
    "leakyrelu": lambda b, x: nn.leakyrelu(x, 0.3),
    "clip": lambda b, x: op.clip(x, 0.5, 2.0),
    "sigmoid": lambda b, x: op.sigmoid(x),
    "tanh": lambda b, x: op.tanh(x),
    "silu": lambda b, x: nn.silu(x),
    "gelu": lambda b, x: nn.gelu(x),
    "gelu_tanh": lambda b, x: nn.gelu_tanh(x),
    "hardswish": lambda b, x: hardswish(x),
    "softplus": lambda b, x: nn.softplus(x),
    "erf": lambda b, x: op.erf(x),
    "exp of tanh": lambda b, x: op.exp(b.emit(op.tanh(x))),
    "square": lambda b, x: op.square(x),
    "sqrt of abs": lambda b, x: op.sqrt(b.emit(op.abs(x))),
    "negative": lambda b, x: op.negative(x),
    "astype": lambda b, x: op.astype(b.emit(op.astype(x, "float16")), "float32"),
    "hard sigmoid": lambda b, x: op.divide(
        b.emit(op.clip(b.emit(op.add(x, scalar(3.0))), 0, 6)), scalar(6.0)
    ),
    "one minus": lambda b, x: op.subtract(scalar(1.0), x),
    "scalar [1,1,1,1]": lambda b, x: op.multiply(x, const(1, 1, 1, 1)),
    "channel bias": lambda b, x: op.add(x, const(1, int(x.ty.shape.values[1]), 1, 1)),
    "channel scale of rank 3": lambda b, x: op.multiply(const(int(x.ty.shape.values[1]), 1, 1), x),
    "constant image": lambda b, x: op.add(x, const(1, 1, *PIXELS)),
    "constant row": lambda b, x: op.add(x, const(PIXELS[1])),
    "constant tensor": lambda b, x: op.maximum(x, const(*(int(e) for e in x.ty.shape.values))),
    "itself": lambda b, x: op.minimum(x, b.emit(nn.relu(x))),
    "mean gate": lambda b, x: op.multiply(x, b.emit(op.mean(x, [2, 3], True))),
    "max pool": lambda b, x: nn.max_pool2d(x, (3, 2), (2, 1), (1, 0, 1, 1), ceil_mode=True),
    "average pool": lambda b, x: nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1)),
    "average pool with padding": lambda b, x: nn.avg_pool2d(
        x, (3, 3), (2, 2), (1, 1, 1, 1), count_include_pad=True
    ),
    "global average pool": lambda b, x: nn.adaptive_avg_pool2d(x, (1, 1)),
    "adaptive average pool": lambda b, x: nn.adaptive_avg_pool2d(x, (2, 3)),
    "mean over height": lambda b, x: op.mean(x, [-2], True),
    "sum": lambda b, x: op.sum(x, [2, 3], True),
    "max": lambda b, x: op.max(x, [2, 3], True),
    "min": lambda b, x: op.min(x, [3, 2], True),
    "nearest": lambda b, x: op.image.resize2d(x, (9, 5), method="nearest_neighbor"),
    "bilinear": lambda b, x: op.image.resize2d(x, (12, 14), method="linear"),
    "bicubic": lambda b, x: op.image.resize2d(x, (4, 11), method="cubic"),
    "zero padding": lambda b, x: nn.pad(x, [0, 0, 0, 0, 1, 0, 2, 1], "constant", 0.0),
    "some images and columns": lambda b, x: op.strided_slice(x, [0, 3], [1, 0], [2, 7], [1, 2]),
    "rows backwards": lambda b, x: op.strided_slice(x, [-2], [5], [-7], [-1]),
    "reflection": lambda b, x: nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], "reflect"),
    "concat over height": lambda b, x: op.concat([x, b.emit(nn.relu(x))], 2),
    "layer norm": lambda b, x: layer_norm(x),
    "layer norm of gelu": lambda b, x: layer_norm(b.emit(nn.gelu(x))),
    "prelu": lambda b, x: nn.prelu(x, const(int(x.ty.shape.values[1]))),
    "prelu of one slope": lambda b, x: nn.prelu(x, relax.const(np.full(PIXELS[1], -0.4, "f4")), 3),
    "shuffle": lambda b, x: shuffle(x),
    "split over width": lambda b, x: op.add(*emit_all(b, *halves(b, op.split(x, [3], 3)))),
}


def layer_norm(x, axes=(1,)):
    extents = [int(x.ty.shape.values[axis]) for axis in axes]
    return nn.layer_norm(x, const(*extents), const(*extents), list(axes), 1e-3)


def shuffle(x):
    """Two groups where the channels are even, else as many as there are channels."""
    channels = int(x.ty.shape.values[1])
    return channel_shuffle(x, channels, 2 if channels % 2 == 0 else channels)


def halves(builder, call):
    """Two parts of a split, the longer one cut to the length of the shorter by pooling."""
    parts = builder.emit(call)
    left, right = builder.emit(relax.TupleGetItem(parts, 0)), relax.TupleGetItem(parts, 1)
    return left, nn.max_pool2d(builder.emit(right), (1, 2))


@pytest.mark.quick_cases(28)
@pytest.mark.parametrize("middle", STAY_PACKED.values(), ids=STAY_PACKED.keys())
@pytest.mark.parametrize(("channels", "block"), [(13, 8), (16, 4)])
def test_stays_packed(middle, channels, block):
    found = check(build(middle, channels), block)
    assert (found["pack"], found["unpack"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "block"),
    [(13, 8), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((16, 4), (24, 16)))],
)
def test_numbers_of_what_stays_packed(channels, block):
    check_numbers({name: build(middle, channels) for name, middle in STAY_PACKED.items()}, block)


ONLY_FULL_BLOCKS = {
    "square root": lambda b, x: op.sqrt(b.emit(op.add(b.emit(op.square(x)), scalar(1.0)))),
    "division by a tensor": lambda b, x: op.divide(x, b.emit(op.exp(b.emit(op.tanh(x))))),
    "division by channels": lambda b, x: op.divide(x, const(1, int(x.ty.shape.values[1]), 1, 1)),
    "concat over channels": lambda b, x: op.concat([x, b.emit(nn.relu(x))], 1),
    "logarithm": lambda b, x: op.log(b.emit(op.add(b.emit(op.abs(x)), scalar(1.0)))),
    "large scalars": lambda b, x: op.multiply(b.emit(op.add(x, scalar(1e6))), scalar(1e-6)),
    "exponential of many": lambda b, x: op.divide(
        b.emit(op.exp(b.emit(op.multiply(b.emit(op.tanh(x)), scalar(12.0))))), scalar(1e4)
    ),
}


@pytest.mark.parametrize("middle", ONLY_FULL_BLOCKS.values(), ids=ONLY_FULL_BLOCKS.keys())
def test_stays_packed_only_where_channels_fill_their_blocks(middle):
    full = check(build(middle, 16), 8)
    assert (full["pack"], full["unpack"]) == (0, 1)
    padded = check(build(middle, 13), 8)
    assert padded["pack"] == 1 and padded["unpack"] in (2, 3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("channels", [13, 16])
def test_numbers_of_what_stays_packed_in_full_blocks(channels):
    cases = {name: build(middle, channels) for name, middle in ONLY_FULL_BLOCKS.items()}
    check_numbers(cases, 8)


def split_and_add(sections):
    def middle(builder, x):
        parts = builder.emit(op.split(x, sections, 1))
        items = [builder.emit(relax.TupleGetItem(parts, index)) for index in range(2)]
        return op.concat([builder.emit(nn.relu(items[0])), items[1]], 1)

    return middle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "sections", "stays"),
    [(32, 2, True), (24, [8], True), (24, [16], True), (21, [16], True), (24, 2, False)],
)
def test_split_and_concat_at_block_borders(channels, sections, stays):
    before = build(split_and_add(sections), channels)
    assert (check(before, 8)["pack"] == 0) == stays
    check_numbers({"split": before}, 8)


STAY_PLAIN = {
    "softmax over channels": lambda b, x: nn.softmax(x, 1),
    "mean over channels": lambda b, x: op.mean(x, [1], True),
    "mean over batch": lambda b, x: op.mean(x, [0], True),
    "layer norm of pixels": lambda b, x: layer_norm(x, (2, 3)),
    "layer norm of images": lambda b, x: layer_norm(x, (1, 2, 3)),
    "mean over everything": lambda b, x: op.mean(x, None, True),
    "slopes of columns": lambda b, x: nn.prelu(x, const(PIXELS[1]), 3),
    "transposition": lambda b, x: op.permute_dims(x, [0, 1, 3, 2]),
    "channels backwards": lambda b, x: op.strided_slice(x, [1], [-1], [-9], [-1]),
    "channel padding": lambda b, x: nn.pad(x, [0, 0, 1, 2, 0, 0, 0, 0]),
    "more channels by broadcast": lambda b, x: op.add(
        b.emit(op.mean(x, [1], True)), const(1, 9, 1, 1)
    ),
    "a fifth axis": lambda b, x: op.mean(
        b.emit(op.add(x, const(2, 2, int(x.ty.shape.values[1]), 1, 1))), [0]
    ),
    "unknown bound": lambda b, x: op.add(x, b.emit(op.mean(x, None, False))),
}


@pytest.mark.parametrize("middle", STAY_PLAIN.values(), ids=STAY_PLAIN.keys())
def test_stays_plain(middle):
    found = check(build(middle, 13), 8)
    assert found["pack"] in (0, 1) and found["unpack"] == 2


def test_infinite_slopes_stay_plain():
    slopes = relax.const(np.full(13, np.inf, "float32"))
    assert check(build(lambda b, x: nn.prelu(x, slopes), 13), 8)["nn.prelu"] == 1


def test_slices_and_concatenation_between_block_borders_are_packed_at_once():
    found = check(build(split_and_add(2), 24), 8)
    assert (found["channel_slice"], found["pack"], found["unpack"]) == (2, 1, 3)


def test_an_uneven_split_for_nobody_but_the_caller_stays_plain():
    before = build(lambda b, x: relax.TupleGetItem(b.emit(op.split(x, 2, 1)), 0), 24, last=False)
    found = check(before, 8)
    assert (found["channel_slice"], found["split"], found["unpack"]) == (0, 1, 1)


@pytest.mark.slow
def test_numbers_around_what_stays_plain():
    check_numbers({name: build(middle, 13) for name, middle in STAY_PLAIN.items()}, 8)


def plain_gate(builder, x):
    """A gate that comes out of a dense layer."""
    channels = int(x.ty.shape.values[1])
    dense = op.matmul(builder.emit(op.mean(x, [2, 3], False)), const(channels, channels))
    return builder.emit(op.reshape(builder.emit(op.tanh(builder.emit(dense))), (2, channels, 1, 1)))


def spatial_gate(builder, x):
    """One number a pixel, from all channels."""
    return builder.emit(op.sigmoid(builder.emit(op.mean(x, [1], True))))


def plain_twin(builder, x):
    """A tensor of the same shape that exists in NCHW only."""
    return builder.emit(nn.softmax(x, 1))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("middle", "last", "packs", "unpacks"),
    [
        # The gate is small: packing it costs nothing, whatever follows.
        (lambda b, x: op.multiply(x, plain_gate(b, x)), True, 1, 2),
        (lambda b, x: op.multiply(plain_gate(b, x), x), False, 1, 2),
        # A tensor without channels of its own needs no packing to broadcast.
        (lambda b, x: op.multiply(x, spatial_gate(b, x)), True, 0, 2),
        # A large one is packed for a convolution, and for nothing else.
        (lambda b, x: op.add(x, plain_twin(b, x)), True, 1, 2),
        (lambda b, x: op.add(x, plain_twin(b, x)), False, 0, 1),
        (lambda b, x: op.concat([x, plain_twin(b, x)], 2), True, 1, 2),
        (lambda b, x: op.concat([x, plain_twin(b, x)], 2), False, 0, 1),
        # What is unpacked for another reader anyway is not unpacked a second time.
        (lambda b, x: op.add(plain_twin(b, x), b.emit(nn.relu(x))), False, 0, 1),
        # Reading only the packed tensor moves the unpacking behind the op.
        (lambda b, x: nn.relu(x), False, 0, 1),
        (lambda b, x: op.image.resize2d(x, (3, 3)), False, 0, 1),
    ],
)
def test_packs_only_what_pays(middle, last, packs, unpacks):
    before = build(middle, 16, last)
    found = check(before, 8)
    assert (found["pack"], found["unpack"]) == (packs, unpacks)
    check_numbers({"middle": before}, 8)


@pytest.mark.slow
def test_parameters_of_any_rank_join():
    channels = 13
    names = {"bias": (channels, 1, 1), "scale": (1, channels, 1, 1), "shift": (7,), "one": ()}
    params = [relax.Var(name, relax.TensorType(shape)) for name, shape in names.items()]
    image = relax.Var("image", relax.TensorType((2, 3, *PIXELS)))
    builder = relax.BlockBuilder()
    with builder.function("main", [image, *params]):
        with builder.dataflow():
            x = builder.emit(conv2d(image, const(channels, 3, 1, 1)))
            for param in params[:2]:
                x = builder.emit(op.multiply(x, param))
            x = builder.emit(conv2d(x, const(16, channels, 1, 1)))
            for param in params[2:]:
                x = builder.emit(op.add(param, x))
            output = builder.emit_output(x)
        builder.emit_func_output(output)
    before = builder.get()
    after = PackLayout(block=8)(before)
    assert calls(after)["pack"] == 2 and calls(after)["unpack"] == 1, after.script()
    data = [
        RNG.standard_normal(shape).astype("float32") for shape in [(2, 3, *PIXELS), *names.values()]
    ]
    results = []
    for mod in (before, after):
        machine = relax.VirtualMachine(compile_unchecked(mod, TARGET), tvm.cpu())
        results.append(machine["main"](*(tvm.runtime.tensor(array) for array in data)).numpy())
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
