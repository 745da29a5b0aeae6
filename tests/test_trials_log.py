import os

from bstune.trial.processes.trials_log import MAX_KINDS, TrialsLog


def log_in(folder):
    """A log, its path, and the lines that it says."""
    said = []
    path = folder / "trials.log"
    return TrialsLog(path, said.append), path, said


def test_a_kind_of_line_is_said_once_and_each_is_written(tmp_path):
    log, path, said = log_in(tmp_path)
    # They differ by numbers alone, and so are of one kind.
    for epoch in range(3):
        log.take(f"epoch {epoch}, loss {0.5 / (epoch + 1):.3f}")
    # A blank line is written, and never said.
    log.take("")
    log.take("another")
    assert len(path.read_text().splitlines()) == 5
    assert said[0] == "epoch 0, loss 0.500"
    # The second of a kind is not said: the file is pointed to, once.
    assert [str(path) in line for line in said] == [False, True, False]


def test_kinds_are_said_up_to_a_number(tmp_path):
    log, path, said = log_in(tmp_path)
    for kind in range(3 * MAX_KINDS):
        log.take("a" * (kind + 1))
    # One line more points to the file.
    assert len(said) == MAX_KINDS + 1
    assert len(path.read_text().splitlines()) == 3 * MAX_KINDS


def test_a_link_is_not_followed(tmp_path):
    log, path, said = log_in(tmp_path)
    other = tmp_path / "other"
    # Whoever may write into the folder could have another file overwritten.
    path.symlink_to(other)
    log.take("a line")
    assert said == ["a line"]
    assert not other.exists()


def test_control_characters_are_visible(tmp_path):
    log, path, said = log_in(tmp_path)
    log.take("\x1b]0;owned\x07")
    assert "\x1b" not in said[0] + path.read_text()


def test_lines_come_through_a_pipe_until_it_is_closed(tmp_path):
    log, path, said = log_in(tmp_path)
    reading, writing = os.pipe()
    # A process may end in the middle of a line.
    os.write(writing, b"one\ntwo\nrest")
    os.close(writing)

    class End:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            os.close(reading)

        def fileno(self):
            return reading

    log._read(End())
    assert said == ["one", "two", "rest"]
    assert path.read_text() == "one\ntwo\nrest\n"
