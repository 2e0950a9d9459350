"""Nobody may move a running job's data by accident: these values never change."""

import os
import subprocess
import sys

import pytest

from dtruntime.sharding import ConsistentHash, Permutation, ShardManager, SlotTable
from dtruntime.sharding.hashing import fold, hash_name, mix

QUESTIONS = """
from dtruntime.sharding import *

def digest(numbers):
    return int(sum(int(n) * (i + 1) for i, n in enumerate(numbers)))

ring, bounded = ConsistentHash(), ConsistentHash(20, load_factor=1.1)
manager = ShardManager("imagenet", 500, shuffle=True, seed=7)
for i in range(7):
    ring.add_node(f"worker-{i}")
    bounded.add_node(f"worker-{i}")
    manager.add_worker(f"worker-{i}")
table = SlotTable(3000, seed=11)
answers = [
    Permutation(10**12, 1, 2).slice(5, 9).tolist(),
    digest(Permutation(37, 3)[i] for i in range(37)),
    digest(table.owners(130)),
    digest(table.owners(130, range(0, 120, 3))),
    digest(table.owners(130, {5}, [1 + i % 8 for i in range(130)])),
    " ".join(ring.get_node(key) for key in "abcdefgh"),
    [digest(shards) for shards in ring.assign("imagenet", 400).values()],
    [digest(shards) for shards in bounded.assign("imagenet", 400).values()],
    digest(manager.assign_shards(3, "worker-4")),
]
"""


def answers_here():
    scope = {}
    exec(QUESTIONS, scope)
    return scope["answers"]


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_another_process_with_other_string_hashes_agrees(hash_seed):
    program = f"{QUESTIONS}\nprint(answers)"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout == f"{answers_here()}\n"


def test_hashes_are_pinned():
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(2**64 - 1) == 0xE4D971771B652C20
    assert (fold(), fold(42, 0), fold(-1), fold(2**200)) == (
        0xE220A8397B1DCDAF,
        0x3951529FE8A0CC63,
        0xA562DF66C82C649A,
        0xE651A42F2B94B30C,
    )
    assert hash_name("imagenet") == 0xA265991236E4A33D


def test_everything_built_on_them_is_pinned():
    assert answers_here() == [
        [584579214312, 837954490477, 182498561309, 158069806558],
        11465,
        290339678,
        301002805,
        295803782,
        "worker-2 worker-5 worker-0 worker-5 worker-6 worker-2 worker-3 worker-1",
        [422742, 561863, 522198, 303036, 417087, 383649, 487918],
        [566364, 307082, 342623, 462104, 556028, 461084, 394235],
        672019,
    ]


def test_small_orders_are_pinned():
    assert list(Permutation(10, 42, 0)) == [5, 8, 2, 6, 7, 4, 0, 1, 3, 9]
    assert list(Permutation(10, 42, 1)) == [7, 9, 5, 4, 0, 6, 8, 2, 1, 3]
    assert list(Permutation(10)) == [8, 5, 1, 6, 0, 4, 7, 3, 2, 9]
    assert Permutation(1281167, 42, 0).slice(0, 4).tolist() == [795856, 573270, 1089000, 859814]


def test_small_tables_are_pinned():
    table = SlotTable(20, seed=1)

    def owners(*membership):
        return "".join(map(str, table.owners(*membership)))

    assert owners(1) == "0" * 20
    assert owners(4) == "20232113030330122101"
    assert owners(5) == "44242113030330122104"
    assert owners(5, {1}) == "44242243030330022304"
    assert owners(5, {1, 3}) == "44242442000240022204"
    assert owners(3, (), [4, 4, 2]) == "10202110000110122101"


def test_small_rings_and_managers_are_pinned():
    ring = ConsistentHash()
    for node in ("worker-1", "worker-2"):
        ring.add_node(node)
    assert ring.get_node_for_shard("imagenet", 42) == "worker-2"
    manager = ShardManager("imagenet", 12)
    manager.add_worker("a")
    manager.add_worker("b")
    assert manager.assign_shards(0, "a") == [1, 2, 5, 8, 9, 10]
