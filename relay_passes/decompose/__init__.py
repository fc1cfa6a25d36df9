# SPDX-License-Identifier: Apache-2.0
"""Ops that hide reductions, written as reductions and element-wise ops: one rule a file."""
