"""Data sets of token ids: the rules of the format, and the conversion of texts."""

import csv
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom.cli import app
from kvloom.contract.errors import BadRequest
from kvloom.tuning import dataset
from kvloom.tuning.dataset import RowRules, convert, read_rows, read_texts, write_rows

ROWS = st.lists(st.lists(st.integers(0, 2**31), min_size=1, max_size=20), min_size=1, max_size=20)


@given(ROWS)
def test_rows_that_are_written_are_read_again(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "rows.csv"
    write_rows(path, rows)
    assert read_rows(path) == rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,2\n1,x\n", "line 2: must be token ids"),
        ("1,2,\n", "line 1: must be token ids"),
        ("1,2\n\n1,100\n", "line 3: token ids must be from 0 on below 100, the size of the vocabulary, got 100"),
        ("1,-2\n", "line 1: token ids must be from 0 on"),
        ("\n\n", "holds no row"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, text, says):
    path = tmp_path / "data.csv"
    path.write_text(text)
    with pytest.raises(BadRequest, match=says):
        read_rows(path, vocab_size=100)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(BadRequest, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


RECORDS = [{"text": "one", "lang": "en"}, {"text": "zwei", "lang": "de"}, {"text": "three, 3", "lang": "en"}]


def write_source(folder, suffix):
    path = folder / f"source{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, RECORDS)) + "\n\n")
    elif suffix == ".csv":
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["text", "lang"])
            writer.writeheader()
            writer.writerows(RECORDS)
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    return path


@pytest.mark.parametrize("suffix", dataset.FORMATS)
def test_texts_of_each_format_with_conditions(tmp_path, suffix):
    path = write_source(tmp_path, suffix)
    assert list(read_texts(path)) == ["one", "zwei", "three, 3"]
    assert list(read_texts(path, where=["lang=en"])) == ["one", "three, 3"]
    assert list(read_texts(path, field="lang")) == ["en", "de", "en"]
    with pytest.raises(BadRequest, match="record 1: has no text 'body'; its fields are: text, lang"):
        list(read_texts(path, field="body"))


def test_a_folder_is_all_its_files_and_lines_may_be_texts(tmp_path):
    (tmp_path / "b.jsonl").write_text('"second"\n')
    (tmp_path / "a.jsonl").write_text('"first"\n')
    (tmp_path / "notes.txt").write_text("no")
    assert list(read_texts(tmp_path)) == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [("x.txt", "", "must end with"), ("x.jsonl", "{", "line 1: is not JSON"), ("x.jsonl", "3", "line 1: must be")],
)
def test_a_source_that_cannot_be_read_is_refused(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadRequest, match=says):
        list(read_texts(tmp_path / name))


def test_an_empty_folder_and_a_bad_condition_are_refused(tmp_path):
    with pytest.raises(BadRequest, match="holds no"):
        list(read_texts(tmp_path))
    with pytest.raises(BadRequest, match="name=value"):
        list(read_texts(tmp_path, where=["lang"]))


def test_parquet_without_its_library_says_how_to_get_it(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(dataset.importlib, "import_module", missing)
    with pytest.raises(BadRequest, match=r"pip install 'kvloom\[parquet\]'"):
        list(read_texts(tmp_path / "x.parquet"))


@pytest.mark.parametrize("name", ["pipe.csv", "pipe.jsonl", "pipe.parquet"])
def test_a_pipe_to_which_nobody_writes_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadRequest, match="it is a pipe to which nobody writes"):
        list(read_texts(tmp_path / name))
    with pytest.raises(BadRequest, match="it is a pipe to which nobody writes"):
        read_rows(tmp_path / name)


def test_rows_are_cut_begun_and_counted():
    counts: list[int] = []
    rows = convert(iter(["abc", "", "\x01b", "d", "e"]), lambda t: list(t.encode()), RowRules(3, 1, 3), counts.append)
    assert rows == [[1, 97, 98], [1, 98], [1, 100]]
    assert counts == [1, 2, 3]
    assert convert(iter(["ab"]), lambda t: list(t.encode()), RowRules()) == [[97, 98]]


@pytest.mark.real
def test_the_command_writes_what_the_tokenizer_says(tmp_path, smollm2_path):
    source, out = write_source(tmp_path, ".jsonl"), tmp_path / "out.csv"
    command = ["dataset", str(source), str(out), "--model", str(smollm2_path), "--begin-with", "1", "--limit", "2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2 rows" in result.output
    assert all(row[0] == 1 for row in read_rows(out))


def test_a_damaged_parquet_file_is_one_sentence(tmp_path):
    pytest.importorskip("pyarrow")
    for data in (b"", b"PAR1 and no more", b"PAR1" + bytes(100) + b"PAR1"):
        (tmp_path / "x.parquet").write_bytes(data)
        with pytest.raises(BadRequest, match=r"x\.parquet: is damaged, or no parquet file"):
            list(read_texts(tmp_path / "x.parquet"))
