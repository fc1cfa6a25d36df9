# SPDX-License-Identifier: Apache-2.0
"""Names of this project's attributes, with who writes and who reads each.

TVM keeps attributes of functions and of modules, and annotations of blocks and loops, by name. All
names that passes and schedules use to tell each other something are here.
"""

# Functions that are to be scheduled.

OP = "tvm_fusion.op"
"""Name of our operator that a function computes. :mod:`relay_passes.op` writes it; ``FusePack`` and
the rules of packed layouts and of channel norms read it."""

WORKLOAD = "tvm_fusion.workload"
"""Computation of a function, as JSON. :mod:`relay_passes.op` and ``FusePack`` write it for
convolutions, whose rules read it, and templates for their kernels; ``ShareKernels``, profiles and
predictions read it, too."""

CHANNELS, EPSILON = "tvm_fusion.channels", "tvm_fusion.epsilon"
"""Channels and epsilon of a norm over channels, from :mod:`relay_passes.op` to its rule."""

REDUCE, REDUCE_SHAPE = "tvm_fusion.reduce", "tvm_fusion.reduce_shape"
"""Workload of a coalesced reduction, and the shape of its data, which fused producers hide, as
JSON. :mod:`schedules.compute` writes them; passes and rules of reductions read them."""

COLUMN_SUMS = "tvm_fusion.column_sums"
"""Rows of each partial sum of columns. :mod:`schedules.compute` writes it; ``FuseReductions`` and
the rule of reductions read it."""

REDUCE_CONFIG = "tvm_fusion.reduce_config"
"""Configuration of a group of reductions on a GPU, as JSON, from ``ConfigureReductions`` to the
rule."""

WINDOWS = "tvm_fusion.windows"
"""Regions of parameters that a function accesses, by their positions, as JSON; its body says the
same. Written and read by :mod:`schedules.tir.parameter_windows`."""

CONSTANTS = "tvm_fusion.constants"
"""Positions of the parameters that are constants in all calls, from ``MarkConstants`` to the rules
of products."""

TF32 = "tvm_fusion.tf32"
"""Products of float32 may be rounded to TF32, says ``AllowTF32`` to the rules for GPUs."""

CACHED = "tvm_fusion.cached"
"""Results are read again while they are in the caches, say programs over ranks to the rules of
stencils."""

# Functions that are scheduled.

RULE = "tvm_fusion.rule"
"""Name of the rule that scheduled a function; reports and predictions read it."""

FAILED_RULES = "tvm_fusion.failed_rules"
"""Reasons by the names of rules that failed, as JSON, for warnings and reports."""

TEMPLATE, VERSION, KNOB = "tvm_fusion.template", "tvm_fusion.version", "tvm_fusion.knob."
"""Template of a tunable function, its version, and the prefix of its knobs' names: annotations for
MetaSchedule."""

RECORD = "tvm_fusion.record"
"""The record that chose the knobs, as JSON; the compiler lists those that were used."""

LAID_OUT = "tvm_fusion.laid_out"
"""A constant matrix among the parameters has the layout [extent / lanes, other extent, lanes]: its
position, the axis that is cut, and the lanes. Rules of products write it for ``PackWeights``."""

ROUNDED = "tvm_fusion.rounded"
"""Position of a constant of float32 among the parameters that has to be rounded to TF32. Rules of
products of warpgroups write it for ``PackWeights``."""

OPERATIONS, RATE = "tvm_fusion.operations", "tvm_fusion.rate"
"""Operations of a kernel that cannot be counted, two for a product that is added to a sum, and how
many times as many a second a CPU does of them as of its words of bytes; 0 for those of floats.
Kernels of narrow weights tell profiles."""

NUMBERS, CYCLES = "tvm_fusion.numbers", "tvm_fusion.cycles"
"""Type of the numbers that a kernel multiplies, for profiles, and the clock cycles that its cost
model predicts for its busiest core, for predictions. Kernels of attention in tile registers have
them."""

TITLE = "tvm_fusion.title"
"""Operation of a kernel in a few words, for profiles."""

CPU_ONLY = "tvm_fusion.cpu_only"
"""Name of an operator whose kernel no thread of a GPU may run; the pipeline refuses it there."""

TILES = "tvm_fusion.tiles"
"""Types of the products of a function that uses tile registers; a saved model names them."""

SCATTERED = "tvm_fusion.scattered"
"""Neighbouring threads of a kernel cannot all read and write neighbouring elements, says the rule
of element-wise functions to audits."""

LIFTED_OUTPUTS = "tvm_fusion.lifted_outputs"
"""Flags of a function's results that say which are arguments; ``LiftOutputs`` tells the
compiler."""

# Modules.

WEIGHTS = "tvm_fusion.weights"
"""Tensors for the parameters that ``LiftWeights`` has added, in order."""

FUSION_REPORT, RECORDED_LAYERS = "tvm_fusion.fusion_report", "tvm_fusion.recorded_layers"
"""Decisions of ``FuseConv2D`` as JSON, for ``explain``, and layers that it left apart by a record,
for ``ChooseWinograd``."""

REDUCTION_REPORT = "tvm_fusion.reduction_report"
"""Decisions of the passes for reductions as JSON, for ``explain``."""

RANK_PLAN = "tvm_fusion.rank_plan"
"""The :class:`schedules.distribute.rows.row_plan.RankPlan` as JSON, from ``DistributeRows`` to the
passes behind it and to the compiler."""

NODES, KERNELS = "tvm_fusion.nodes", "tvm_fusion.kernels"
"""Labels of the model's nodes, and numbers of nodes by names of functions, as JSON. The compiler
writes the former and ``NoteKernels`` the latter, for errors that name nodes."""

# Blocks and loops, within one rule.

TAIL = "tvm_fusion.tail"
"""Outermost part of a split loop: see :mod:`schedules.cpu.nests.tails`."""

STREAM = "tvm_fusion.stream"
"""Vectors of a block bypass the caches: the bytes of a vector register, and of those that may be
prefetched into the second cache."""

STEP = "tvm_fusion.step"
"""Loop over the rows of a step, around vectors: see
:mod:`schedules.cpu.nests.stencil_rows`."""

MULTIPLY_ADD = "tvm_fusion.multiply_add"
"""Sums of products of a block are rounded once."""

INTERLEAVED = "tvm_fusion.interleaved"
"""Vectors of a block are loaded together where they are interleaved."""

BIND = "tvm_fusion.bind"
"""Loop of a thread of a GPU while the arithmetic of bfloat16 is replaced."""

# Ops of Relax.

REGISTERED = "tvm_fusion.registered"
"""An op has its own functions, not stand-ins that import them."""
