# SPDX-License-Identifier: Apache-2.0
"""PyTorch front end: exported programs, and the backend ``tvm_fusion`` of ``torch.compile``.

Both go through ONNX, by the exporter of PyTorch itself. It needs the extra ``torch``; no other
family imports this one.
"""
