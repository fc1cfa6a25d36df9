# SPDX-License-Identifier: Apache-2.0
"""Timelines of execution graphs, simulated: what host, streams and ranks do when.

Pure algorithms without files; the rest of ``prediction`` imports them. Start with
``execution_graph.py``, then ``simulate`` in ``timelines.py``.
"""
