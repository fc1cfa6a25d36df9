# SPDX-License-Identifier: Apache-2.0
"""TE computes: pure functions from tensors to tensors, one file a kernel family."""
