# SPDX-License-Identifier: Apache-2.0
"""Times of kernels before they run, on machines that need not be at hand.

Machines, kernel calls, and models of kernels, which are functions from a call and a machine to a
time. Imports nothing but numpy; every other family
and storey may import it. Start with ``predict`` in ``decisions.py``.
"""
