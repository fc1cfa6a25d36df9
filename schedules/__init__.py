# SPDX-License-Identifier: Apache-2.0
"""What becomes of a loop nest: TE computes, schedule rules, and what they agree on."""
