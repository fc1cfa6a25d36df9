# SPDX-License-Identifier: Apache-2.0
"""Templates with knobs, and the records of tuned ones.

Imports only ``schedules.errors``; the families of rules and the storeys above may import it.
Start with ``template.py``.
"""
