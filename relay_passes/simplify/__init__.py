# SPDX-License-Identifier: Apache-2.0
"""The rewriting rules of SimplifyInference, one a file, and the graph that they edit."""
