"""Background work on threads."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dtruntime._background import Consumer, abandonable, side_by_side


async def test_abandonable_work_gives_its_result_or_its_error_from_a_thread_of_its_own() -> None:
    assert await abandonable(lambda: threading.current_thread().name, "aside") == "aside"
    with pytest.raises(ZeroDivisionError):
        await abandonable(lambda: 1 // 0, "aside")


async def test_cancelled_wait_does_not_end_the_work() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait()
        ended.set()

    waiting = abandonable(work, "aside")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 30)


def test_exit_does_not_wait_for_abandoned_work() -> None:
    program = """
import asyncio, threading
from dtruntime._background import Consumer, abandonable, side_by_side

async def main():
    async with asyncio.timeout(0.01):
        await abandonable(threading.Event().wait, "aside")

try:
    asyncio.run(main())
except TimeoutError:
    print("left")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (run.stdout, run.stderr) == ("left\n", "")


def test_work_side_by_side_gives_results_in_the_order_of_its_items() -> None:
    together = threading.Barrier(3)

    def square(number: int) -> int:
        if number < 3:
            together.wait(30)  # it takes three threads to get past this
        return number * number

    assert side_by_side(iter(range(50)), square, 3) == [number**2 for number in range(50)]
    assert side_by_side([], square, 1) == []


def test_work_side_by_side_takes_no_items_after_a_failure() -> None:
    taken = iter(range(1000))

    def fail(number: int) -> None:
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item"):
        side_by_side(taken, fail, 4)
    assert len(list(taken)) >= 990


def test_consumer_gets_all_items_in_order_and_its_error_reaches_whoever_closes_it() -> None:
    consumed: list[int] = []
    consumer: Consumer[int] = Consumer(consumed.extend, 2, "consumer")
    for number in range(100):
        consumer.put(number)
    consumer.close()
    assert consumed == list(range(100))

    def fail(items: Iterator[int]) -> None:
        raise ValueError(f"cannot take {next(items)}")

    consumer = Consumer(fail, 2, "consumer")
    consumer.put(7)
    with pytest.raises(ValueError, match="cannot take 7"):
        consumer.close()


def test_items_that_a_failed_consumer_leaves_are_dropped_and_putting_never_hangs() -> None:
    dropped: list[int] = []
    failed = threading.Event()

    def fail(items: Iterator[int]) -> None:
        next(items)
        failed.set()
        raise ValueError("full")

    consumer: Consumer[int] = Consumer(fail, 1, "consumer", dropped.append)
    consumer.put(0)
    assert failed.wait(30)
    numbers = iter(range(1, 100))
    with pytest.raises(ValueError, match="full"):
        any(consumer.put(number) for number in numbers)  # type: ignore[func-returns-value]
    consumer.close(InterruptedError())
    assert dropped == list(range(1, next(numbers)))


def test_closing_a_consumer_with_an_error_raises_it_where_the_items_are_consumed() -> None:
    seen: list[object] = []

    def consume(items: Iterator[int]) -> None:
        try:
            seen.extend(items)
        except InterruptedError as exc:
            seen.append(exc)
            raise

    consumer: Consumer[int] = Consumer(consume, 2, "consumer")
    consumer.put(1)
    error = InterruptedError()
    consumer.close(error)
    assert seen[-1] is error
