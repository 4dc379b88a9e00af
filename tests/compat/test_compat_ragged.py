"""The replacement for k2.RaggedTensor: examples of k2's documentation, and its limits."""

import pickle

import pytest
import torch

from pruned_rnnt.compat import ragged
from pruned_rnnt.compat.ragged import RaggedShape, RaggedTensor


def test_from_lists() -> None:
    y = RaggedTensor([[1, 3], [], [5]])
    assert (y.num_axes, y.shape.num_axes, y.dim0, y.shape.dim0) == (2, 2, 3, 3)
    assert (y.tot_size(0), y.tot_size(1), y.numel()) == (3, 3, 3)
    assert (y.shape.tot_sizes(), y.shape.max_size(1), y.shape.numel()) == ((3, 3), 2, 3)
    assert y.dtype == y.values.dtype == torch.int32
    assert y.values.tolist() == [1, 3, 5]
    splits, ids = y.shape.row_splits(1), y.shape.row_ids(1)
    assert (splits.dtype, ids.dtype) == (torch.int32, torch.int32)
    assert splits.tolist() == [0, 2, 2, 3]
    assert ids.tolist() == [0, 0, 2]
    assert y.tolist() == [[1, 3], [], [5]]
    assert (y.device, y.is_cuda, y.requires_grad) == (torch.device("cpu"), False, False)


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_empty_ragged_tensors(rows: list[list[int]]) -> None:
    y = RaggedTensor(rows)
    assert y.tolist() == rows
    assert y.shape.row_splits(1).tolist() == [0] * (len(rows) + 1)
    assert y.shape.row_ids(1).tolist() == []
    assert y.pad("constant", 7).shape == (len(rows), 0)
    assert ragged.cat([y, y], axis=1) == y


def test_dtypes() -> None:
    assert RaggedTensor([[1, 3.0], []]).dtype == torch.float32
    assert RaggedTensor([[1]], dtype=torch.float64).dtype == torch.float64
    assert RaggedTensor([[1]]).to(torch.float32).values.tolist() == [1.0]
    with pytest.raises(ValueError, match=r"dtype is torch\.int64; it must be int32, float32"):
        RaggedTensor(torch.zeros(2, 2, dtype=torch.int64))


def test_from_a_tensor_shares_its_memory() -> None:
    rows = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    y = RaggedTensor(rows)
    rows[0, 0] = 10
    assert y.tolist() == [[10, 1, 2], [3, 4, 5]]
    assert RaggedTensor(rows[:, ::2]).tolist() == [[10, 2], [3, 5]]
    assert RaggedTensor(torch.zeros(2, 0, dtype=torch.int32)).tolist() == [[], []]


def test_from_a_shape() -> None:
    shape = RaggedTensor([[0, 0], [], [0]]).shape
    assert RaggedTensor(shape, torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1.0, 2.0], [], [3.0]]
    with pytest.raises(ValueError, match=r"value is of shape \(2,\); the shape needs \(3,\)"):
        RaggedTensor(shape, torch.zeros(2))
    with pytest.raises(ValueError, match="value is missing"):
        RaggedTensor(shape)


def test_pad() -> None:
    y = RaggedTensor([[1], [], [2, 3], [5, 8, 9, 8, 2]])
    constant = y.pad(mode="constant", padding_value=-1)
    assert constant.dtype == torch.int32
    assert constant.tolist() == [
        [1, -1, -1, -1, -1], [-1, -1, -1, -1, -1], [2, 3, -1, -1, -1], [5, 8, 9, 8, 2],
    ]  # fmt: skip
    assert y.pad("replicate", -1).tolist() == [
        [1, 1, 1, 1, 1], [-1, -1, -1, -1, -1], [2, 3, 3, 3, 3], [5, 8, 9, 8, 2],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="mode is 'edge'; it must be 'constant' or 'replicate'"):
        y.pad("edge", 0)


def test_pad_sends_gradients_back() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = RaggedTensor(RaggedTensor([[0], [0, 0]]).shape, values)
    y.pad("constant", 0).mul(torch.tensor([[2.0, 5.0], [3.0, 4.0]])).sum().backward()
    assert values.grad.tolist() == [2.0, 3.0, 4.0]


def test_cat() -> None:
    a = RaggedTensor([[1, 3], [], [5, 8], [], [9]])
    b = RaggedTensor([[0], [1, 8], [], [-1], [10]])
    assert ragged.cat([a, b], axis=0).tolist() == a.tolist() + b.tolist()
    joined = [[1, 3, 0], [1, 8], [5, 8], [-1], [9, 10]]
    assert ragged.cat((a, b), axis=1).tolist() == joined
    assert RaggedTensor.cat([a, b], axis=1).tolist() == joined
    assert ragged.cat([a, b, a], axis=1).tolist()[0] == [1, 3, 0, 1, 3]


@pytest.mark.parametrize(
    ("srcs", "axis", "message"),
    [
        ([], 0, "srcs is empty"),
        ([[[1]], [[1.0]]], 0, "they must be the same"),
        ([[[1]], [[1], [2]]], 1, r"srcs have \[1, 2\] rows; axis 1 needs equal numbers"),
        ([[[1]]], 2, "axis is 2; it must be 0 or 1"),
    ],
)
def test_cat_refuses_different_dtypes_or_rows(srcs: list, axis: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ragged.cat([RaggedTensor(rows) for rows in srcs], axis)


def test_rows() -> None:
    y = RaggedTensor([[10, 20], [300], [], [4, 5, 6]])
    assert y[3].tolist() == [4, 5, 6]
    assert y[-2].tolist() == []
    assert y[1:3].tolist() == [[300], []]
    assert y[torch.tensor([1, 2, 0])].tolist() == [[300], [], [10, 20]]
    assert y[torch.tensor([], dtype=torch.int64)].tolist() == []
    assert [row.tolist() for row in y] == y.tolist()


def test_removing_values() -> None:
    y = RaggedTensor([[1, 2, 0], [3], [0, 1]])
    assert y.remove_values_leq(1).tolist() == [[2], [3], []]
    assert y.remove_values_eq(0).tolist() == [[1, 2], [3], [1]]


def test_equality_copies_and_files() -> None:
    y = RaggedTensor([[1, 2], [3]])
    copy = y.clone()
    assert copy == y
    assert copy.shape == y.shape
    copy.values[0] = 5
    assert copy != y
    assert y != RaggedTensor([[1], [2, 3]])
    assert pickle.loads(pickle.dumps(y)) == y
    assert y.to("cpu") == y
    assert y.to(torch.device("cpu")) == y


def test_repr() -> None:
    assert str(RaggedTensor([[1], [2, 3], []])) == (
        "RaggedTensor([[1],\n              [2, 3],\n              []], dtype=torch.int32)"
    )
    assert str(RaggedTensor([[1], [2, 3], []]).shape) == "[ [ x ] [ x x ] [ ] ]"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "data must be a list of lists of numbers"),
        ("[[1] [2 3]]", "data must be a list of lists of numbers"),
        ([[[1], [2]]], "data has three axes or more; without k2 it must have 2"),
        (torch.zeros(3), "data has 1 dimensions; without k2 it must have 2"),
    ],
)
def test_unsupported_arguments_are_refused(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaggedTensor(data)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    y = RaggedTensor([[1, 3], [], [5]], device="cuda")
    assert y.is_cuda
    assert y.shape.row_splits(1).is_cuda
    assert ragged.cat([y, y], axis=1).pad("constant", 0).tolist() == [
        [1, 3, 1, 3], [0, 0, 0, 0], [5, 5, 0, 0],
    ]  # fmt: skip
    assert y.to("cpu") == RaggedTensor([[1, 3], [], [5]])
    assert isinstance(y.shape, RaggedShape)
