# SPDX-License-Identifier: Apache-2.0
"""Faults of the kind that code review misses, one edit each, and the tests that have to catch them.

Borders, strides, masks, swapped axes, identities, NaN, missing checks, types of accumulation,
locks, files. ``python tests/faults/run.py`` seeds one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One edit of product code.

    Parameters
    ----------
    name : str
        What is wrong.
    file : str
        Path from the root of the repository.
    old, new : str
        Text that is in the file exactly once, and its replacement.
    tests : tuple[str, ...]
        Files or folders of tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


KERNELS = (
    Fault(
        "bytes of the data count as signed, those of the weights as unsigned",
        "schedules/cpu/core/micro_kernel.py",
        '"llvm.x86.avx2.pmadd.ub.sw", factor, vector)',
        '"llvm.x86.avx2.pmadd.ub.sw", vector, factor)',
        ("tests/schedules/cpu/conv2d/test_quantized_conv2d.py",),
    ),
    Fault(
        "what sums of signed bytes lack is that of the first column of the kernel in all others",
        "schedules/cpu/core/micro_kernel.py",
        "tap = ops.in_blocks * taps + kh * ops.layer.kernel[1] + kw",
        "tap = ops.in_blocks * taps + kh * ops.layer.kernel[1]",
        ("tests/tvm_fusion/compiler/test_quantized_networks.py",),
    ),
    Fault(
        "sums of bytes are cut though partial ones have no room in the output",
        "schedules/cpu/cost/conv2d_knobs.py",
        "whole = plain or kernel.out_dtype is not None",
        "whole = plain",
        ("tests/schedules/cpu/conv2d/test_quantized_conv2d.py",),
    ),
    Fault(
        "padding on the right reads one column of the next row",
        "schedules/compute/conv2d.py",
        "w >= left, w < width + left)",
        "w >= left, w <= width + left)",
        ("tests/relay_passes/op/test_conv2d_op.py",),
    ),
    Fault(
        "relu of NaN is 0",
        "schedules/compute/conv2d.py",
        "return tirx.Select(element < const(low), const(low), element)",
        "return tirx.max(element, const(low))",
        ("tests/schedules/cpu/conv2d/test_conv2d.py",),
    ),
    Fault(
        "columns are dilated as rows are",
        "schedules/compute/conv2d.py",
        "w * layer.strides[1] + kw * layer.dilation[1],",
        "w * layer.strides[1] + kw * layer.dilation[0],",
        ("tests/relay_passes/op/test_conv2d_op.py",),
    ),
    Fault(
        "the copy of a tail of columns does not begin where the overlapping tile does",
        "schedules/cpu/nests/reduction_nests.py",
        "if width % (vectors * lanes) and not reads_columns_in_order(sch, facts, copied):",
        "if width < lanes:",
        ("tests/schedules/cpu/loops/matmul/test_dense.py",),
    ),
    Fault(
        "lanes past the last channel are copied, not zeroed",
        "schedules/compute/pack.py",
        "    if true_channels % block == 0:",
        "    if true_channels % block >= 0:",
        ("tests/relay_passes/op/test_pack.py", "tests/schedules/cpu/conv2d/test_pack.py"),
    ),
    Fault(
        "the mean over channels counts the lanes past the last one",
        "schedules/compute/norms.py",
        "share = tirx.const(1 / channels, dtype)",
        "share = tirx.const(1 / (int(blocks) * int(lanes)), dtype)",
        (
            "tests/relay_passes/op/test_channel_norm_op.py",
            "tests/schedules/cpu/conv2d/test_channel_norm.py",
        ),
    ),
    Fault(
        "extremes begin with the largest finite number",
        "schedules/workload/reduce_operator.py",
        "infinity = tirx.infinity(dtype)",
        "infinity = tirx.max_value(dtype)",
        (
            "tests/relay_passes/op/test_coalesced_reduce_op.py",
            "tests/schedules/cpu/reduce/test_coalesced_reduce.py",
            "tests/gpu/reduce/test_coalesced_reduce.py",
        ),
    ),
    Fault(
        "extremes lose NaN",
        "schedules/workload/reduce_operator.py",
        "beats = tirx.any(beats, tirx.isnan(challenger))",
        "beats = tirx.any(beats, tirx.const(False, 'bool'))",
        ("tests/relay_passes/op/test_coalesced_reduce_op.py",),
    ),
    Fault(
        "sums begin with 0.0, so a sum of -0.0 is 0.0",
        "schedules/workload/reduce_operator.py",
        'tirx.const(-0.0 if "float" in dtype else 0, dtype)',
        "tirx.const(0, dtype)",
        (
            "tests/gpu/reduce/test_coalesced_reduce.py",
            "tests/relay_passes/op/test_coalesced_reduce_op.py",
        ),
    ),
    Fault(
        "the last of equal extremes wins",
        "schedules/workload/reduce_operator.py",
        "tirx.all(tie, at_b < at_a)",
        "tirx.all(tie, at_b > at_a)",
        (
            "tests/relay_passes/op/test_coalesced_reduce_op.py",
            "tests/gpu/reduce/test_coalesced_reduce.py",
        ),
    ),
    Fault(
        "a tile at the right border sees one pixel too many",
        "schedules/cpu/core/tiles.py",
        "behind = (in_width - 1 - column) // stride + 1",
        "behind = (in_width - column) // stride + 1",
        ("tests/schedules/cpu/core/test_tiles.py", "tests/schedules/cpu/conv2d/test_conv2d.py"),
    ),
    Fault(
        "the last kernel row is left out at the bottom border",
        "schedules/cpu/core/micro_kernel.py",
        "tirx.floordiv(height - 1 - origin, dilation) + 1",
        "tirx.floordiv(height - 2 - origin, dilation) + 1",
        ("tests/schedules/cpu/conv2d/test_conv2d.py",),
    ),
    Fault(
        "partial sums of a layer in parts get the bias again",
        "schedules/cpu/core/micro_kernel.py",
        "value = tirx.if_then_else(first, value, _load(ops.output.buffer, place, lanes))",
        "value = tirx.if_then_else(first, value, value + _load(ops.output.buffer, place, lanes))",
        (
            "tests/schedules/cpu/conv2d/test_conv2d.py",
            "tests/schedules/cpu/conv2d/test_fused_conv2d.py",
        ),
    ),
    Fault(
        "the overlapping tile begins one element late",
        "schedules/cpu/nests/tails.py",
        "total - overlap.tile)) + inside",
        "total - overlap.tile + 1)) + inside",
        ("tests/schedules/cpu/nests/test_overlapping_tails.py",),
    ),
    Fault(
        "a masked lane of a sum is added twice",
        "schedules/cpu/reduce/tasks.py",
        "value = tirx.Select(lane >= i64(since), value, states.nothing()[0])",
        "value = tirx.Select(lane + 1 >= i64(since), value, states.nothing()[0])",
        ("tests/schedules/cpu/reduce/test_coalesced_reduce.py",),
    ),
    Fault(
        "warps are combined before all have stored their states",
        "schedules/gpu/reduce/kernel/combine.py",
        "    sync()\n    if meeting is not None:\n        meeting.behind()",
        "    if meeting is not None:\n        meeting.behind()",
        ("tests/gpu/reduce/test_coalesced_reduce_cuda.py",),
    ),
    Fault(
        "neighbouring lanes of a warp are not combined",
        "schedules/gpu/reduce/kernel/combine.py",
        "    while width > 1:\n        width //= 2",
        "    while width > 2:\n        width //= 2",
        ("tests/gpu/reduce/test_reduce_chains.py",),
    ),
    Fault(
        "no block finishes every other launch of a reduction",
        "schedules/gpu/core/workspace_slot.py",
        '"int32") for half in (1, 2))',
        '"int32") for half in (1, 1))',
        ("tests/gpu/reduce/test_coalesced_reduce.py",),
    ),
    Fault(
        "a reduction that has waited in vain leaves its workspace as it is",
        "tvm_fusion/runtime/memory.py",
        "            self.reset()\n            raise TargetError(",
        "            raise TargetError(",
        ("tests/tvm_fusion/runtime/test_workspaces.py",),
    ),
    Fault(
        "the last block of a cluster is left out",
        "schedules/gpu/reduce/kernel/combine.py",
        "for rank in range(1, ctx.config.cluster):",
        "for rank in range(1, ctx.config.cluster - 1):",
        ("tests/gpu/reduce/test_clusters.py",),
    ),
    Fault(
        "a vector behind the end of a kept row is visited",
        "schedules/gpu/reduce/kernel/group_kernel.py",
        "place < i64(reduced)",
        "place <= i64(reduced)",
        ("tests/gpu/reduce/test_reduce_chains.py",),
    ),
    Fault(
        "sums of 16-bit floats are kept in 16 bits",
        "schedules/gpu/conv2d/any_conv2d.py",
        "dtype = ACCUMULATOR.get(stored, stored)",
        "dtype = stored",
        ("tests/gpu/conv2d/test_conv2d_cuda.py",),
    ),
    Fault(
        "a depthwise column steps over the data by the stride of columns",
        "schedules/gpu/conv2d/depthwise_column.py",
        "row = self.row * layer.strides[0] + (offset - layer.padding[0])",
        "row = self.row * layer.strides[1] + (offset - layer.padding[0])",
        ("tests/gpu/conv2d/test_conv2d.py",),
    ),
    Fault(
        "moments of a segment are added without what lies between the means of its parts",
        "schedules/gpu/gemm/matmul/row_tile.py",
        "own + d * d * weight for",
        "own for",
        ("tests/gpu/gemm/matmul/test_statistics_gpu.py",),
    ),
    Fault(
        "rows of a fragment of TF32 are shifted by one mean",
        "schedules/gpu/gemm/matmul/tensor_core_matmul.py",
        "shifts[2 * number + half] for half",
        "shifts[2 * number] for half",
        ("tests/gpu/gemm/matmul/test_statistics_gpu.py",),
    ),
    Fault(
        "a depthwise layer before a product on tensor cores is summed in its own type",
        "schedules/gpu/conv2d/tensor_core_pair_pattern.py",
        "inlined=widened",
        "inlined=before",
        ("tests/gpu/conv2d/test_tensor_core_pair.py",),
    ),
    Fault(
        "neighbouring panels of an intermediate have their lines in the same order",
        "schedules/gpu/conv2d/tensor_core_pair_tile.py",
        "line ^ (panel % 2)",
        "line",
        ("tests/gpu/conv2d/test_tensor_core_pair.py",),
    ),
    Fault(
        "a small tile is asked for the registers of its sums, without those of its addresses",
        "schedules/gpu/conv2d/conv2d.py",
        "_blocks_at_once(tile, max(tile.registers, registers), gpu)",
        "_blocks_at_once(tile, tile.registers, gpu)",
        ("tests/gpu/conv2d/test_conv2d_cuda.py",),
    ),
    Fault(
        "a transposed tile that is not full is stored whole",
        "schedules/gpu/pointwise/transpose.py",
        "inside = extent is not None and extent % _TILE == 0",
        "inside = extent is not None and extent >= _TILE",
        ("tests/gpu/pointwise/test_transpose_gpu.py",),
    ),
    Fault(
        "parts of a vector register are stored past the caches, one by one",
        "schedules/cpu/nests/elementwise_nest.py",
        "is_adjacent and stored >= register and",
        "is_adjacent and",
        ("tests/schedules/cpu/nests/stencils/test_stencils.py",),
    ),
)

PASSES = (
    Fault(
        "bytes are padded with zero, whatever zero stands for",
        "relay_passes/conv2d/quantized/multiply_bytes.py",
        "pad_value=-source.low)",
        "pad_value=0.0)",
        ("tests/relay_passes/conv2d/quantized/test_multiply_bytes.py",),
    ),
    Fault(
        "small weights count as whole numbers of a large scale",
        "relay_passes/core/integer_weights.py",
        "limits = _TOLERANCE * np.abs(units).max(axis=1, initial=0)",
        "limits = 127 * _TOLERANCE",
        ("tests/relay_passes/core/test_integer_weights.py",),
    ),
    Fault(
        "frames are padded at the end as at the beginning",
        "relay_passes/simplify/conv_as_conv2d.py",
        "shapes, attrs, (front, back)),",
        "shapes, attrs, (back, front)),",
        ("tests/relay_passes/simplify/conv2d/test_flatten_conv3d.py",),
    ),
    Fault(
        "the frames of a dilated kernel are neighbours",
        "relay_passes/simplify/conv_as_conv2d.py",
        "for begin in range(0, taps * dilation, dilation):",
        "for begin in range(taps):",
        ("tests/relay_passes/simplify/conv2d/test_flatten_conv3d.py",),
    ),
    Fault(
        "a packed slice of channels takes blocks of them",
        "relay_passes/layout/packed/image_ops.py",
        "data is None or 1 in axes or not scope",
        "data is None or not scope",
        ("tests/relay_passes/layout/packed/test_packed_rules.py",),
    ),
    Fault(
        "the running variance stands for the running mean",
        "relay_passes/simplify/fold_into_conv2d.py",
        "return norm.args[2 + item.index]",
        "return norm.args[5 - item.index]",
        ("tests/relay_passes/simplify/conv2d/test_fold_batch_norm.py",),
    ),
    Fault(
        "a batch normalisation without centring gets its beta",
        "relay_passes/simplify/fold_into_conv2d.py",
        "shift = (beta if norm.attrs.center else 0.0) - mean * scale",
        "shift = beta - mean * scale",
        ("tests/relay_passes/simplify/conv2d/test_fold_batch_norm.py",),
    ),
    Fault(
        "padding before and after an axis are swapped",
        "relay_passes/simplify/fold_into_conv2d.py",
        "added = (*before[2:], *after[2:])",
        "added = (*after[2:], *before[2:])",
        ("tests/relay_passes/simplify/conv2d/test_fold_pad.py",),
    ),
    Fault(
        "a scaled tensor with other readers is folded",
        "relay_passes/simplify/fold_into_conv2d.py",
        "match is None or not graph.has_one_use(match[0]):\n        return None\n    data, factor",
        "match is None:\n        return None\n    data, factor",
        ("tests/relay_passes/simplify/conv2d/test_fold_scale.py",),
    ),
    Fault(
        "an offset is folded in front of a padded convolution",
        "relay_passes/simplify/fold_into_conv2d.py",
        "(any(padding_of(call)) or is_whole(graph, call.args[0]))",
        "is_whole(graph, call.args[0])",
        ("tests/relay_passes/simplify/conv2d/test_fold_input_affine.py",),
    ),
    Fault(
        "input factors of groups take turns",
        "relay_passes/simplify/fold_into_conv2d.py",
        "np.repeat(channels.reshape(groups, per_group), weight.shape[0] // groups, axis=0)",
        "np.tile(channels.reshape(groups, per_group), (weight.shape[0] // groups, 1))",
        ("tests/relay_passes/simplify/conv2d/test_fold_input_affine.py",),
    ),
    Fault(
        "disjoint clips become one with its bounds the wrong way round",
        "relay_passes/simplify/elementwise.py",
        "low, high = (min(max(bound, outer.low), outer.high) for bound in (self.low, self.high))",
        "low, high = max(self.low, outer.low), min(self.high, outer.high)",
        ("tests/relay_passes/simplify/elementwise/test_canonicalize_clip.py",),
    ),
    Fault(
        "lanes past the last channel may grow without limit",
        "relay_passes/layout/packed/packing_state.py",
        "return self.fills_blocks(channels) or bound <= _LARGEST_BOUND",
        "return self.fills_blocks(channels) or bound > 0",
        ("tests/relay_passes/layout/packed/test_packed_rules.py",),
    ),
    Fault(
        "a softmax is not relative to its maximum",
        "relay_passes/decompose/losses.py",
        "relax.op.subtract(wide, largest)",
        "relax.op.subtract(wide, relax.op.multiply(largest, relax.op.zeros_like(largest)))",
        ("tests/relay_passes/decompose/test_decompose_normalization.py",),
    ),
    Fault(
        "ignored targets count in the mean of a loss",
        "relay_passes/decompose/losses.py",
        "graph.emit_once(relax.op.where(ignored, number(0, like), weight))",
        "graph.emit_once(relax.op.where(ignored, weight, weight))",
        ("tests/relay_passes/decompose/test_decompose_normalization.py",),
    ),
)

IMPORTER = (
    Fault(
        "SAME_UPPER pads like SAME_LOWER",
        "tvm_fusion/onnx/operators/pooling.py",
        'return small + large if mode == "SAME_UPPER" else large + small',
        'return small + large if mode == "SAME_LOWER" else large + small',
        ("tests/tvm_fusion/onnx/test_rewrite.py",),
    ),
    Fault(
        "a negative index below the first is accepted",
        "tvm_fusion/onnx/operators/indexing.py",
        "bad = (value >= extents) | (value < -extents)",
        "bad = value >= extents",
        ("tests/tvm_fusion/onnx/test_guards.py", "tests/tvm_fusion/onnx/test_rewrite.py"),
    ),
    Fault(
        "an index from data may be one past the last",
        "schedules/cpu/loops/checked_indices.py",
        "index >= bound",
        "index > bound",
        ("tests/tvm_fusion/onnx/operators/test_indices.py",),
    ),
    Fault(
        "the last row of each chunk of indices is not checked",
        "schedules/cpu/loops/checked_indices.py",
        "end = tirx.min(begin + long(rows), extent)",
        "end = tirx.min(begin + long(rows), extent) - long(1)",
        ("tests/tvm_fusion/onnx/operators/test_indices.py",),
    ),
    Fault(
        "a Mod of floats has the sign of the dividend",
        "tvm_fusion/onnx/operators/arithmetic.py",
        '"Where", apart, moved, remainder',
        '"Where", apart, remainder, remainder',
        ("tests/tvm_fusion/onnx/operators/test_expansions.py",),
    ),
)

RUNTIME = (
    Fault(
        "arrays that are not aligned are used in place by kernels that need it",
        "tvm_fusion/runtime/arguments.py",
        "tensor = export(carrier, max(alignment, array.itemsize))",
        "tensor = export(carrier, array.itemsize)",
        ("tests/tvm_fusion/runtime/test_arguments.py",),
    ),
    Fault(
        "a result in the memory of an input is not copied",
        "tvm_fusion/runtime/arguments.py",
        "if place is None and (not new or overlaps(array, taken)):",
        "if place is None and not new:",
        (
            "tests/tvm_fusion/runtime/test_arguments.py",
            "tests/tvm_fusion/runtime/test_compiled_model.py",
        ),
    ),
    Fault(
        "a model is written in place, so half of it stays when that fails",
        "tvm_fusion/paths.py",
        'aside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.partial")',
        "aside = target",
        ("tests/tvm_fusion/runtime/test_artifact.py",),
    ),
    Fault(
        "two threads run a model at once",
        "tvm_fusion/runtime/thread_pool.py",
        "    with turn:\n        _set_threads(threads)\n        return function(*args)",
        "    _set_threads(threads)\n    return function(*args)",
        (
            "tests/tvm_fusion/runtime/test_thread_pool.py",
            "tests/tvm_fusion/runtime/test_compiled_model.py",
        ),
    ),
    Fault(
        "a part of a loop that a thread has begun is also done by the caller",
        "tvm_fusion/codegen/worker_pool.ll",
        "br i1 %won, label %take, label %helped",
        "br label %take",
        ("tests/tvm_fusion/runtime/test_worker_pool.py",),
    ),
    Fault(
        "the code of one architecture is that of another",
        "tvm_fusion/codegen/nvrtc.py",
        'options = [f"--gpu-architecture={arch}", ',
        'options = ["--gpu-architecture=sm_90", ',
        ("tests/tvm_fusion/codegen/test_nvrtc.py",),
    ),
    Fault(
        "a chunk is copied to a device while the kernel of an earlier one reads the same memory",
        "tvm_fusion/distributed/accelerator/device_run.py",
        "            copied = self._of_slot(kernels, number)\n",
        "            copied: list[Event] = []\n",
        ("tests/tvm_fusion/distributed/accelerator/test_cuda_driver.py",),
    ),
    Fault(
        "a kernel overwrites rows that have not been copied back from a device",
        "tvm_fusion/distributed/accelerator/device_run.py",
        "[*copied, *self._of_slot(ends, number)]",
        "copied",
        ("tests/tvm_fusion/distributed/accelerator/test_cuda_driver.py",),
    ),
    Fault(
        "weights of a device are copied for its first chunk into the memory of one slot only",
        "tvm_fusion/distributed/accelerator/device_run.py",
        "1 if name in self._sequence.resident else self._sequence.slots",
        "self._sequence.slots",
        ("tests/tvm_fusion/distributed/accelerator/test_cooperative.py",),
    ),
    Fault(
        "a rank divides by what nobody has filled, in rows that nobody reads",
        "schedules/distribute/regions.py",
        "    if nest.may_trap:\n",
        "    if False:\n",
        ("tests/tvm_fusion/distributed/test_program.py",),
    ),
    Fault(
        "a step overwrites rows that the one before has yet to read",
        "schedules/distribute/time_skewing.py",
        "place = begin + number * block - step * reach",
        "place = begin + number * block - step",
        ("tests/tvm_fusion/distributed/test_skewed_steps.py",),
    ),
    Fault(
        "the last rows of later steps are left out",
        "schedules/distribute/time_skewing.py",
        "bottom + reach * (steps - 1), end)",
        "bottom, end)",
        ("tests/tvm_fusion/distributed/test_skewed_steps.py",),
    ),
    Fault(
        "a run that begins at an odd step reads what was written the step before",
        "tvm_fusion/distributed/local_program.py",
        "        if first % 2:  # odd",
        "        if False:  # odd",
        ("tests/tvm_fusion/distributed/test_skewed_steps.py",),
    ),
    Fault(
        "the CPU gets of a device what one step reads, and computes several",
        "schedules/distribute/split.py",
        "own_regions(plan.nest, _rows_of_steps(plan, rank, rows))",
        "own_regions(plan.nest, rows)",
        ("tests/tvm_fusion/distributed/accelerator/test_kept_rows.py",),
    ),
    Fault(
        "two pairs of ranks share a slot",
        "tvm_fusion/distributed/world/shared_slots.py",
        "+ column - (column > row))",
        "+ column - (column > 0))",
        ("tests/tvm_fusion/distributed/world/test_shared_slots.py",),
    ),
    Fault(
        "a message in shared memory is overwritten by the next one",
        "tvm_fusion/distributed/world/communicator.py",
        "            if parcel.slot is not None and not request.Test():\n",
        "            if False:\n",
        ("tests/tvm_fusion/distributed/world/test_communicator.py",),
    ),
    Fault(
        "the last bytes of a message that is streamed stay behind",
        "tvm_fusion/distributed/world/parcel.py",
        "np.empty(-(-nbytes // unit) * unit, np.uint8)",
        "np.empty(nbytes // unit * unit, np.uint8)",
        ("tests/tvm_fusion/distributed/world/test_parcel.py",),
    ),
    Fault(
        "a message is announced before it has left the processor",
        "schedules/distribute/rows/exchange_kernel.py",
        "                T.add_to_parent(store_fence())\n",
        "",
        ("tests/schedules/distribute/test_streamed_copy.py",),
    ),
)

FAULTS = (*KERNELS, *PASSES, *IMPORTER, *RUNTIME)
