"""The file of an evaluation: how a run continues it, and what it refuses."""

from __future__ import annotations

import errno
import json

import pytest

from proxykv_hf import InvalidInputError
from proxykv_hf.evaluation.rows import RowFile, key_of
from proxykv_hf.evaluation.sole import sole_use

fcntl = pytest.importorskip("fcntl")

HEADER = {
    "format": 1,
    "target": "org/tiny",
    "target_weights": "00ff",
    "mapper": "some/mapper",
    "dtype": "float32",
    "tokens": 256,
    "seed": 0,
    "allocation": "native",
    "query_aware": False,
    "wording": "77",
    "data": None,
    "tasks": {"fetch": "exact"},
    "examples": {"fetch 0": "aa", "fetch 1": "bb"},
    "methods": ["full", "random", "proxykv"],
    "ratios": [0.3],
    "identities": {"random": "seed 0", "proxykv": "mapper 1"},
    "versions": {"torch": "2"},
    "hardware": "an abacus",
    "commit": "abc",
    "command": ["proxykv", "evaluate"],
}


def row(example="0", question=0, method="random", ratio=0.3):
    key = {"task": "fetch", "example": example, "question": question, "method": method}
    return key | {"allocation": "uniform", "ratio": ratio, "answer": "a\u2028b", "score": 0.5}


BLOCKS = [[row(example, question) for question in range(3)] for example in "01"]


@pytest.fixture
def path(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl", HEADER)
    for block in BLOCKS:
        file.append(block)
    return file.path


def test_a_link_stays_one(path, tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    RowFile(link, HEADER | {"ratios": [0.5]}).append([row("2")])
    assert link.is_symlink()
    assert header_of(path)["ratios"] == [0.3, 0.5]
    assert len(path.read_text().splitlines()) == 8
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.jsonl", "rows.jsonl"]


def test_a_file_is_used_by_one_run_at_a_time(tmp_path, monkeypatch):
    path, link = tmp_path / "rows.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    with sole_use(path):
        for same in (path, link):
            with pytest.raises(InvalidInputError, match=f"{same} is in use by another run: wait"), sole_use(same):
                pass
        with sole_use(tmp_path / "other.jsonl"):
            pass
    with pytest.raises(KeyError), sole_use(path):
        raise KeyError
    with sole_use(link):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["link.jsonl"]


def test_a_lock_file_that_was_removed_before_it_was_locked_is_not_held(tmp_path, monkeypatch):
    path, beside, flock = tmp_path / "rows.jsonl", tmp_path / ".rows.jsonl.lock", fcntl.flock
    got = []

    def late(lock, how):
        flock(lock, how)
        got.append(lock)
        if len(got) == 1:  # the previous run ends between open and lock
            beside.unlink()

    monkeypatch.setattr(fcntl, "flock", late)
    with sole_use(path):
        assert len(got) == 2
        monkeypatch.undo()
        with pytest.raises(InvalidInputError, match="in use"), sole_use(path):
            pass


def test_a_disk_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def unknown(lock, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with sole_use(tmp_path / "rows.jsonl"), sole_use(tmp_path / "rows.jsonl"):
        pass
    assert list(tmp_path.iterdir()) == []


def header_of(path):
    return json.loads(path.read_text().splitlines()[0])["header"]


def test_what_is_written_is_read_back(path):
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"header": HEADER},
        *[{**entry, "block": 3} for block in BLOCKS for entry in block],
    ]
    before = path.read_bytes(), path.stat().st_mtime_ns
    file = RowFile(path, HEADER)
    assert [key_of(entry) for block in BLOCKS for entry in block] == list(file.rows)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_wherever_a_write_was_cut_short_only_whole_blocks_are_left(path):
    data = path.read_bytes()
    ends = [len(b"\n".join(data.split(b"\n")[:count])) + 1 for count in (1, 4, 7)]  # of the header, of each block
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        file = RowFile(path, HEADER)
        whole = max([end for end in ends if end <= cut], default=ends[0])
        assert path.read_bytes() == data[:whole]
        assert len(file.rows) == {ends[0]: 0, ends[1]: 3, ends[2]: 6}[whole]


def test_blocks_of_one_example_and_size_are_told_apart(path):
    RowFile(path, HEADER).append([row("1", question, ratio=0.5) for question in range(3)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert len(RowFile(path, HEADER).rows) == 6
    path.write_bytes(whole)
    assert len(RowFile(path, HEADER).rows) == 9


def test_the_header_lists_a_later_run(path):
    more = {
        "methods": ["full", "snapkv"],
        "ratios": [0.1, 0.3],
        "tasks": {"other": "f1"},
        "identities": {"snapkv": "window 64"},
        "allocation": "native+global",
        "mapper": None,
        "command": ["proxykv", "evaluate", "more"],
    }
    RowFile(path, HEADER | more)
    found = header_of(path)
    assert found["methods"] == ["full", "random", "proxykv", "snapkv"]
    assert found["ratios"] == [0.3, 0.1]
    assert found["tasks"] == {"fetch": "exact", "other": "f1"}
    assert found["identities"] == HEADER["identities"] | {"snapkv": "window 64"}
    assert (found["allocation"], found["mapper"]) == ("native+global", "some/mapper")
    assert found["command"] == HEADER["command"]
    assert [run["command"] for run in found["later"]] == [["proxykv", "evaluate", "more"]]
    RowFile(path, HEADER | more)
    assert len(header_of(path)["later"]) == 1
    assert len(path.read_text().splitlines()) == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", "org/huge"),
        ("target_weights", "1234"),
        ("dtype", "bfloat16"),
        ("tokens", 512),
        ("seed", 1),
        ("query_aware", True),
        ("wording", "78"),
        ("data", "a file"),
        ("format", 2),
    ],
)
def test_rows_of_something_else_are_not_mixed(path, name, value):
    before = path.read_bytes()
    expected = f"holds results of {name} {HEADER[name]!r}, and this run has {value!r}: give another --out"
    with pytest.raises(InvalidInputError, match=expected):
        RowFile(path, HEADER | {name: value})
    assert path.read_bytes() == before


def test_another_metric_of_a_task_is_refused(path):
    with pytest.raises(InvalidInputError, match="scores of task fetch by exact, and this run has f1"):
        RowFile(path, HEADER | {"tasks": {"fetch": "f1"}})


def test_another_text_of_an_example_is_refused(path):
    RowFile(path, HEADER | {"examples": {"fetch 1": "bb", "fetch 2": "cc"}})
    assert header_of(path)["examples"] == {"fetch 0": "aa", "fetch 1": "bb", "fetch 2": "cc"}
    with pytest.raises(InvalidInputError, match="answers about another text of example fetch 2, whose task or file"):
        RowFile(path, HEADER | {"examples": {"fetch 2": "dd"}})


def test_a_method_of_other_weights_is_refused_or_done_again(path):
    file = RowFile(path, HEADER)
    file.append([row("2", method="proxykv"), row("2", method="full", ratio=1.0)])
    changed = HEADER | {"identities": {"random": "seed 0", "proxykv": "mapper 2"}}
    with pytest.raises(InvalidInputError, match=r"another proxykv \(mapper 1; now mapper 2\): .* or --redo proxykv"):
        RowFile(path, changed)
    assert len(RowFile(path, changed, redo=["proxykv"]).rows) == 7
    assert header_of(path)["identities"]["proxykv"] == "mapper 2"
    RowFile(path, changed).append([row("2", method="proxykv")])
    assert len(RowFile(path, changed).rows) == 8


def test_a_method_that_left_no_rows_may_change(path):
    RowFile(path, HEADER | {"identities": {"proxykv": "mapper 2"}})
    assert header_of(path)["identities"] == {"random": "seed 0", "proxykv": "mapper 2"}


@pytest.mark.parametrize(
    ("number", "line", "what"),
    [(1, b"{}", "a header"), (1, b"words", "a header"), (3, b"{", "a row"), (3, b"[]", "a row"), (3, b"{}", "a row")],
)
def test_other_files_are_refused_and_left_alone(path, number, line, what):
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = line
    path.write_bytes(b"\n".join(lines))
    before = path.read_bytes()
    with pytest.raises(InvalidInputError, match=f"line {number}: expected {what} as `proxykv evaluate` writes it"):
        RowFile(path, HEADER)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("number", "changes", "words"),
    [
        (1, {"tasks": []}, "tasks is not a dict"),
        (1, {"ratios": 0.3}, "ratios is not a list"),
        (1, {"later": 3}, "later is not a list of runs"),
        (3, {"block": 0}, "block is 0, not an integer of at least 1"),
        (3, {"block": "3"}, "block is '3', not an integer of at least 1"),
        (3, {"task": ["fetch"]}, "task is not a string or number"),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_line(path, number, changes, words):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = lines[number - 1]["header"] if number == 1 else lines[number - 1]
    changed |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidInputError, match=f"line {number}: expected .*: {words}"):
        RowFile(path, HEADER)


@pytest.mark.parametrize("content", [b"only copy", b'{"my": "only copy"}', b"{", b'{"header": {"format"'])
def test_a_file_without_a_whole_line_is_ours_only_if_it_begins_like_ours(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    if content[:1] == b"{" and content in b'{"header": {"format": 1':  # a first write that was cut short
        assert not RowFile(path, HEADER).rows
        assert header_of(path) == HEADER
        return
    with pytest.raises(InvalidInputError, match="line 1: expected a header as `proxykv evaluate` writes it"):
        RowFile(path, HEADER)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["examples", "tasks", "identities", "command"])
def test_a_header_that_lacks_a_field_is_refused(path, name):
    lines = path.read_text().splitlines()
    lines[0] = json.dumps({"header": {key: value for key, value in HEADER.items() if key != name}})
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(InvalidInputError, match=f"line 1: expected a header .*KeyError: '{name}'"):
        RowFile(path, HEADER)
