# SPDX-License-Identifier: Apache-2.0
"""What happens to an ONNX model before TVM's importer sees it: loading, checks, shapes, mends."""
