"""What workers note, and which of their notes count."""

import msgspec

from dtruntime.demo.timeline import NoteReader, StepNote, last_notes


def note(step, generation, rank=0, ids=(), at=0.0):
    return StepNote(
        at=at, generation=generation, step=step, rank=rank, loss=1.0, epoch=0, ids=list(ids)
    )


def write(path, *notes, rest=b""):
    path.write_bytes(b"".join(msgspec.json.encode(n) + b"\n" for n in notes) + rest)


def test_only_the_last_crew_that_did_a_step_counts():
    undone = [note(2, 1, ids=[3, 4]), note(3, 1, ids=[5])]
    done = [note(1, 1, ids=[1]), note(2, 4, ids=[3]), note(2, 4, rank=1, ids=[4]), note(3, 4)]

    assert last_notes([*undone, *done]) == {1: done[:1], 2: done[1:3], 3: done[3:]}
    assert last_notes([*done, *undone]) == last_notes([*undone, *done])


def test_note_that_a_killed_worker_did_not_finish_is_left_out(tmp_path):
    write(tmp_path / "w.jsonl", note(1, 1, ids=[7]), rest=b'{"at":1')

    assert NoteReader(tmp_path).news() == [note(1, 1, ids=[7])]


def test_follower_gives_each_note_once_in_the_order_of_time(tmp_path):
    follower = NoteReader(tmp_path)
    write(tmp_path / "a.jsonl", note(1, 1, at=2.0), rest=b'{"at":')
    write(tmp_path / "b.jsonl", note(1, 1, rank=1, at=1.0))
    assert [(mark.at, mark.rank) for mark in follower.news()] == [(1.0, 1), (2.0, 0)]
    assert follower.news() == []

    write(tmp_path / "a.jsonl", note(1, 1, at=2.0), note(2, 1, at=3.0))

    assert [mark.step for mark in follower.news()] == [2]
