# SPDX-License-Identifier: Apache-2.0
"""Views: the same reshapes as PyTorch's need a copy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.prediction.model.eager import contiguous, is_contiguous, view

SIZES = st.sampled_from([1, 2, 3, 4, 6])


def strides_of(array):
    return tuple(stride // array.itemsize for stride in array.strides)


def test_heads_of_one_sequence_are_a_view_and_of_two_are_not():
    heads = (12, 128, 64)
    strides = (128 * 768, 64, 768, 1)
    assert view((1, *heads), strides, heads) == strides[1:]
    assert view((2, *heads), strides, (24, 128, 64)) is None


def test_merged_rows_of_a_transposed_tensor_need_a_copy():
    assert view((1, 128, 12, 64), (98304, 64, 8192, 1), (1, 128, 768)) is None
    assert is_contiguous((1, 5), (7, 1)) and not is_contiguous((2, 5), (7, 1))


@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_a_view_reads_the_same_elements_as_numpy(shape, data):
    base = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    array = base.transpose(data.draw(st.permutations(range(len(shape)))))
    new = data.draw(st.permutations([size for size in array.shape])) + [1]
    found = view(array.shape, strides_of(array), new)
    if found is not None:
        bytes_ = [stride * array.itemsize for stride in found]
        seen = np.lib.stride_tricks.as_strided(array, new, bytes_)
        np.testing.assert_array_equal(seen, array.reshape(new))


def test_strides_of_row_major_tensors():
    assert contiguous((2, 3, 4)) == (12, 4, 1) == strides_of(np.empty((2, 3, 4), np.int8))
