# SPDX-License-Identifier: Apache-2.0
"""Templates with knobs, and the records of tuned ones.

Imports ``schedule_rule`` and ``errors``; the families of rules and the storeys above may import it.
Start with ``template.py``, then ``tunable_rule.py``.
"""
