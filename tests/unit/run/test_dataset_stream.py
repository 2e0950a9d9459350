"""A dataset as the source of batches: what it opens and closes."""

from dtruntime.data import NumberSource
from dtruntime.data.loading import Loader
from dtruntime.run.crew import Crew
from dtruntime.run.datasets import DatasetStream

CREW = Crew((0,), 0, 0)


def test_connection_is_closed_with_the_stream_and_kept_when_the_crew_changes() -> None:
    closed: list[str] = []
    stream = DatasetStream(
        lambda crew: Loader(NumberSource(8, 4), batch_size=4, rank=0, world_size=1),
        lambda: closed.append("connection"),
    )
    stream.open(CREW)
    stream.open(CREW)
    assert len(list(stream.batches())) == 2
    assert closed == []
    stream.close()
    assert closed == ["connection"]


def test_stream_that_was_closed_can_be_opened_for_another_crew() -> None:
    stream = DatasetStream(
        lambda crew: Loader(NumberSource(8, 4), batch_size=4, rank=0, world_size=1)
    )
    for _ in range(2):
        stream.open(CREW)
        assert sum(size for _, size in stream.batches()) == 8
        stream.close()
