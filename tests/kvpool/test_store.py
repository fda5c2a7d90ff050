"""The KV tensors: rows land in their slots, blocks come back whole, moves equal fresh writes."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.store import KVStore

torch.set_num_threads(1)

NUM_LAYERS, NUM_BLOCKS, SIZE, HEADS, DIM_K, DIM_V = 3, 5, 4, 2, 6, 3
SHAPES = [(HEADS, DIM_K, DIM_V)] * NUM_LAYERS
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def _store(
    dtype: torch.dtype = torch.float32, device: str = "cpu", dim_multiple: int = 1
) -> KVStore:
    return KVStore(SHAPES, NUM_BLOCKS, SIZE, dtype, device, dim_multiple)


def _rows(num_rows: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(num_rows, HEADS, DIM_K, generator=generator),
            torch.randn(num_rows, HEADS, DIM_V, generator=generator),
        )
        for _ in range(NUM_LAYERS)
    ]


def _write(store: KVStore, slots: list[int], rows: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for layer, (key, value) in enumerate(rows):
        store.write(layer, torch.tensor(slots, dtype=torch.int64), key, value)


def _bits(tensor: torch.Tensor) -> list[int]:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(integers[tensor.dtype.itemsize]).flatten().tolist()


def _assert_equal_stores(left: KVStore, right: KVStore) -> None:
    for a, b in zip(left.key + left.value, right.key + right.value, strict=True):
        assert _bits(a) == _bits(b.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_written_row_lies_in_its_slot_and_nowhere_else(dtype: torch.dtype) -> None:
    store, rows = _store(dtype), _rows(3)
    _write(store, [17, 2, 9], rows)
    for layer, (key, value) in enumerate(rows):
        expected_k = torch.zeros(NUM_BLOCKS * SIZE, HEADS, DIM_K, dtype=dtype)
        expected_v = torch.zeros(NUM_BLOCKS * SIZE, HEADS, DIM_V, dtype=dtype)
        for row, slot in enumerate((17, 2, 9)):
            expected_k[slot], expected_v[slot] = key[row].to(dtype), value[row].to(dtype)
        assert _bits(store.key[layer]) == _bits(expected_k)
        assert _bits(store.value[layer]) == _bits(expected_v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_are_gathered_in_any_order_and_repeated(dtype: torch.dtype) -> None:
    store, slots = _store(dtype), [7, 3, 3, 19]
    _write(store, list(range(NUM_BLOCKS * SIZE)), _rows(NUM_BLOCKS * SIZE))
    for layer in range(NUM_LAYERS):
        gathered = store.gather(layer, torch.tensor(slots))
        for got, plane in zip(gathered, (store.key[layer], store.value[layer]), strict=True):
            assert got.dtype == dtype
            assert _bits(got.transpose(0, 1)) == _bits(torch.stack([plane[s] for s in slots]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_rows_hold_the_same_and_zeros(dtype: torch.dtype) -> None:
    padded, plain, rows = _store(dtype, dim_multiple=16), _store(dtype), _rows(5)
    for store in (padded, plain):
        _write(store, [1, 3, 5, 7, 9], rows)
        store.move(torch.tensor([3, 9]), torch.tensor([0, 3]))
    _assert_equal_stores(padded, plain)
    per_block = KVStore.bytes_per_block(SHAPES, SIZE, dtype, 16)
    assert padded.num_bytes == NUM_BLOCKS * per_block
    assert per_block == NUM_LAYERS * SIZE * HEADS * (16 + 16) * dtype.itemsize
    for plane in padded.key + padded.value:
        whole = plane.as_strided((NUM_BLOCKS * SIZE, HEADS, 16), plane.stride())
        assert not whole[..., plane.shape[2] :].float().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("source", "destination"),
    [([1, 2, 3], [0, 1, 2]), ([0, 1, 2], [1, 2, 3]), ([4, 9], [9, 4]), ([5, 5], [6, 7]), ([], [])],
)
def test_overlapping_moves_read_everything_before_they_write(
    source: list[int], destination: list[int], dtype: torch.dtype
) -> None:
    store, expected = _store(dtype), _store(dtype)
    rows = _rows(NUM_BLOCKS * SIZE)
    for each in (store, expected):
        _write(each, list(range(NUM_BLOCKS * SIZE)), rows)
    _write(expected, destination, [(key[source], value[source]) for key, value in rows])
    store.move(*(torch.tensor(each, dtype=torch.int64) for each in (source, destination)))
    _assert_equal_stores(store, expected)


def test_layers_may_differ_in_heads_and_dimensions() -> None:
    shapes = [(2, 4, 4), (1, 8, 8), (2, 4, 2)]
    store = KVStore(shapes, 2, SIZE, torch.float32, "cpu")
    rows = [(torch.randn(2, heads, k), torch.randn(2, heads, v)) for heads, k, v in shapes]
    _write(store, [0, 5], rows)
    store.move(torch.tensor([5]), torch.tensor([1]))
    for layer, (key, value) in enumerate(rows):
        assert torch.equal(store.key[layer][[0, 1, 5]], key[[0, 1, 1]])
        assert torch.equal(store.value[layer][[0, 1, 5]], value[[0, 1, 1]])
        keys, values = store.gather(layer, torch.tensor([0, 5]))
        assert torch.equal(keys.transpose(0, 1), key)
        assert torch.equal(values.transpose(0, 1), value)
    per_block = KVStore.bytes_per_block(shapes, SIZE, torch.float32)
    assert store.num_bytes == 2 * per_block == 2 * SIZE * 4 * (8 + 8 + 8 + 8 + 8 + 4)


def test_a_layer_without_rows_of_its_own_has_another_s() -> None:
    """Moved once: rows that are moved twice would be moved on."""
    shapes = [(2, 4, 4), (1, 8, 8), 0, 1]
    store = KVStore(shapes, 2, SIZE, torch.float32, "cpu")
    rows = [(torch.randn(3, *shape[:2]), torch.randn(3, *shape[::2])) for shape in shapes[:2]]  # type: ignore[index]
    _write(store, [1, 2, 3], rows + rows)
    store.move(torch.tensor([2, 3]), torch.tensor([1, 2]))
    for layer, (key, value) in enumerate(rows + rows):
        assert torch.equal(store.key[layer][1:4], key[[1, 2, 2]])
        assert torch.equal(store.gather(layer, torch.tensor([2]))[1][:, 0], value[2])
    per_block = KVStore.bytes_per_block(shapes, SIZE, torch.float32)
    assert store.num_bytes == 2 * per_block == 2 * SIZE * 4 * 4 * 8


def test_a_head_s_slots_lie_together_and_storage_is_aligned() -> None:
    store = _store()
    for plane, dim in ((store.key[1], DIM_K), (store.value[2], DIM_V)):
        assert plane.stride() == (dim, NUM_BLOCKS * SIZE * dim, 1)
    assert store.key[0].data_ptr() % 64 == 0


@pytest.mark.parametrize(
    ("shapes", "num_blocks", "block_size"),
    [
        (SHAPES, 0, 4),
        (SHAPES, 5, 0),
        ([(0, 6, 3)], 5, 4),
        ([*SHAPES, (2, 0, 3)], 5, 4),
        ([*SHAPES, (2, 6, -1)], 5, 4),
    ],
)
def test_impossible_sizes_are_refused(shapes: Any, num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KVStore(shapes, num_blocks, block_size, torch.float32, "cpu")


def test_a_store_takes_memory_where_it_is_written_and_gives_it_back() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    # 256 pieces of 8 MiB: a huge page in each would be half a gigabyte.
    store = KVStore([(2, 64, 64)] * 64, 4096, 16, torch.bfloat16, "cpu")
    rows = torch.ones(1, 2, 64)
    for layer in range(64):
        store.write(layer, torch.tensor([40]), rows, rows)
    assert store.num_bytes == 2 << 30
    assert resident_bytes() - before < 200 << 20
    store.clear()
    assert not any(each[40].any() for each in store.key + store.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_store_holds_the_same_bits() -> None:
    here, there = _store(torch.bfloat16), _store(torch.bfloat16, "cuda")
    slots, source, destination = (torch.tensor(ids) for ids in ([3, 8, 9], [8, 9], [4, 8]))
    for layer, (key, value) in enumerate(_rows(3)):
        here.write(layer, slots, key, value)
        there.write(layer, slots.cuda(), key.cuda(), value.cuda())
    here.move(source, destination)
    there.move(source.cuda(), destination.cuda())
    _assert_equal_stores(here, there)


def test_what_an_8_bit_store_cannot_hold_becomes_its_largest_number() -> None:
    store = _store(torch.float8_e4m3fn)
    key = torch.full((1, HEADS, DIM_K), 1e6)
    store.write(0, torch.tensor([3]), key, -torch.ones(1, HEADS, DIM_V) * 1e6)
    most = torch.finfo(torch.float8_e4m3fn).max
    assert set(store.key[0][3].float().flatten().tolist()) == {most}
    assert set(store.value[0][3].float().flatten().tolist()) == {-most}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim_multiple", [1, 16])
def test_a_block_read_as_bytes_can_be_written_into_any_block(
    dtype: torch.dtype, dim_multiple: int
) -> None:
    store, other = (_store(dtype, dim_multiple=dim_multiple) for _ in range(2))
    for seed, each in enumerate((store, other)):
        _write(each, [*range(NUM_BLOCKS * SIZE)], _rows(NUM_BLOCKS * SIZE, seed))
    expected = [each.clone() for each in other.key + other.value]
    content = torch.empty(store.block_bytes, dtype=torch.uint8)
    store.read_block(3, content)
    other.write_block(1, content)
    planes = store.key + store.value, other.key + other.value
    for mine, its, before in zip(*planes, expected, strict=True):
        assert _bits(its[SIZE : 2 * SIZE]) == _bits(mine[3 * SIZE : 4 * SIZE])
        assert _bits(its[:SIZE]) == _bits(before[:SIZE])
        assert _bits(its[2 * SIZE :]) == _bits(before[2 * SIZE :])
    assert store.layout == other.layout
    assert _store(torch.float64).layout != store.layout
