# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for GPUs, in the order in which they are asked."""
