# SPDX-License-Identifier: Apache-2.0
"""Traces of PyTorch, read: Kineto's, and execution traces.

The rest of ``prediction`` imports it. Start with ``kineto.py``, then ``traced_graph.py``, which
makes an execution graph of a trace.
"""
