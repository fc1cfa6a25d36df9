# SPDX-License-Identifier: Apache-2.0
"""Tuning jobs: tasks of a model, search over their settings, measurements, and a database.

Imports ``compiler`` and what is below; the command line may import it. Start with ``job.py``.
"""
