"""Batch inference in this process: each row once, resumed after a kill, every mistake in one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from keepstep import cli
from keepstep.checkpoint.saver import Saver
from keepstep.checkpoint.store import Manifest, Store

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCRIPT = """
import numpy as np
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

def predict(model, batch):
    assert not model.training and not torch.is_grad_enabled()
    logits = model(torch.from_numpy(batch["x"]))
    return {"logits": logits.numpy(), "predicted": logits.argmax(1).numpy()}
"""

Predict = Callable[..., int]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def save(folder: Path, step: int, **state: Any) -> None:
    saver = Saver(Store(folder / "runs" / "a" / "checkpoints", keep=5), 0, None, "nonce", False, lambda *_: None)
    saver.save(Manifest(step, 0, 1, "single"), state, {"rng": torch.ones(1)}, wait=True)


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    """Saved as step 3 of run `a`."""
    torch.manual_seed(0)
    model = make_model()
    save(tmp_path, 3, model=model.state_dict())
    return model.eval()


def rows(count: int, first: int = 0) -> Any:
    x = np.random.default_rng(first).normal(size=(count, 4)).astype(np.float32)
    columns = {
        "id": pa.array(range(first, first + count)),
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4),
        "name": pa.array([f"row {number}" for number in range(first, first + count)]),
        "image": pa.array([b"png"] * count),
    }
    return pa.table(columns)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three pieces of two files, and what is no data."""
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    pq.write_table(rows(5000), folder / "a.parquet", row_group_size=2500)
    pq.write_table(rows(700, 5000), folder / "deep" / "b.parquet", row_group_size=100)
    (folder / "_note.parquet").write_text("not for us")
    (folder / "readme.txt").write_text("nor this")
    return folder


@pytest.fixture
def predict(tmp_path: Path, model: nn.Module, data: Path, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """`predict("--workers", "2", script=...)` is the command's exit code; the output is `out`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words: str, script: str = SCRIPT, output: str = "out") -> int:
        (tmp_path / "predict.py").write_text(script)
        given = ["--data", str(data)] if "--data" not in words else []
        return cli.main(["predict", "a", "--output", output, "--with", "predict.py", *given, *words])

    return call


@pytest.fixture
def complaint(predict: Predict, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command says, in one line, where it must end with exit code 2."""

    def call(*words: str, **options: str) -> str:
        capsys.readouterr()
        assert predict(*words, **options) == 2
        said = capsys.readouterr().err
        assert said.startswith("keepstep: ") and said.count("\n") == 1, said
        return said

    return call


def expected(model: nn.Module) -> torch.Tensor:
    table = pa.concat_tables([rows(5000), rows(700, 5000)])
    x = table["x"].combine_chunks().flatten().to_numpy().reshape(-1, 4)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor(x))
    return logits


def parts(folder: Path = Path("out")) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("part-"))


def test_every_row_is_predicted_in_the_order_of_the_data(
    predict: Predict, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict("--batch-size", "100") == 0
    table = pq.read_table("out")
    logits = expected(model)
    assert table.schema.names == ["id", "name", "logits", "predicted"]
    assert table["id"].to_pylist() == list(range(5700))
    assert table["predicted"].to_pylist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(np.array(table["logits"].to_pylist()), logits.numpy(), atol=1e-6)
    assert parts() == ["part-000000.parquet", "part-000001.parquet", "part-000002.parquet"]
    assert pq.ParquetFile("out/part-000000.parquet").num_row_groups == 1
    said = capsys.readouterr().out
    assert "5,700 rows predicted with step 3 of a, in 3 parts" in said and "rows/s" in said


def test_a_finished_prediction_says_so_and_does_nothing(predict: Predict, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict() == 0
    before = {path.name: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    assert predict("--batch-size", "7") == 0
    assert {path.name: path.stat().st_mtime_ns for path in Path("out").iterdir()} == before
    assert "finished before, 5,700 rows, step 3 of a" in capsys.readouterr().out


def test_the_same_command_goes_on_where_it_was_killed(predict: Predict, capsys: pytest.CaptureFixture[str]) -> None:
    failing = SCRIPT.replace("logits = ", "if 2600 in batch['id']: raise MemoryError\n    logits = ")
    assert predict(script=failing) == 2
    assert parts() == ["part-000000.parquet"]
    Path("out/.writing-1-part-000001.parquet").write_text("half")  # what a kill leaves
    record = json.loads(Path("out/_prediction.json").read_text())
    same_script = {"script_digest": xxhash.xxh3_128(SCRIPT.encode()).hexdigest()}
    Path("out/_prediction.json").write_text(json.dumps({**record, **same_script}))
    first = Path("out/part-000000.parquet").stat().st_mtime_ns
    assert predict("--batch-size", "33") == 0
    assert "2,500 of 5,700 rows are there" in capsys.readouterr().err
    assert Path("out/part-000000.parquet").stat().st_mtime_ns == first
    assert pq.read_table("out")["id"].to_pylist() == list(range(5700))
    assert not list(Path("out").glob(".writing-*"))


def test_a_part_that_was_damaged_or_lost_is_predicted_again(predict: Predict) -> None:
    assert predict() == 0
    Path("out/part-000000.parquet").unlink()
    whole = Path("out/part-000001.parquet").read_bytes()
    Path("out/part-000001.parquet").write_bytes(whole[:-50])
    assert predict() == 0
    assert Path("out/part-000001.parquet").read_bytes() == whole
    assert pq.read_table("out")["id"].to_pylist() == list(range(5700))


def test_newest_stays_what_it_was_when_the_prediction_was_begun(
    predict: Predict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict() == 0
    Path("out/part-000001.parquet").unlink()
    save(tmp_path, 9, model=make_model().state_dict())
    assert predict() == 0
    assert "with step 3" in capsys.readouterr().out
    assert predict() == 0
    assert "the run has step 9 by now" in capsys.readouterr().out
    assert predict("--checkpoint", "9") == 2
    said = capsys.readouterr().err
    assert "out was begun otherwise: the checkpoint (step 3 of a, now step 9 of a); give another --output" in said
    for path in (tmp_path / "runs" / "a" / "checkpoints" / "step_00000003").iterdir():
        path.unlink()
    (tmp_path / "runs" / "a" / "checkpoints" / "step_00000003").rmdir()
    assert predict() == 0  # it is finished: nobody needs the checkpoint
    Path("out/part-000001.parquet").unlink()
    assert predict() == 2
    assert "begun with step 3, which the run has deleted since" in capsys.readouterr().err


def test_what_differs_is_named(complaint: Callable[..., str], predict: Predict, data: Path) -> None:
    assert predict() == 0
    assert "the script (predict.py, which has changed)" in complaint(script=SCRIPT + "\n")
    assert "--keep (id,name, now id)" in complaint("--keep", "id")
    assert "rows in 1 files" in complaint("--data", str(data / "a.parquet"))
    pq.write_table(rows(700, 9000), data / "deep" / "b.parquet", row_group_size=100)
    assert "the data (5,700 rows in 2 files" in (said := complaint()) and "which has changed)" in said


@pytest.mark.parametrize(
    ("keep", "columns"), [("name", ["name"]), ("image, id", ["image", "id"]), ("", []), ("id,id", ["id"])]
)
def test_columns_to_keep_are_the_users_choice(predict: Predict, keep: str, columns: list[str]) -> None:
    assert predict("--keep", keep) == 0
    assert pq.read_table("out").schema.names == [*columns, "logits", "predicted"]


def returning(what: str) -> str:
    return SCRIPT.replace('return {"logits": logits.numpy(), "predicted": logits.argmax(1).numpy()}', f"return {what}")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (returning("logits"), "predict returned a Tensor; a dict of column name"),
        (returning("{}"), "predict returned an empty dict"),
        (returning("{'p': logits}"), "'p' as a Tensor; a NumPy array was expected; .cpu().numpy() makes one"),
        (returning("{'p': logits.numpy()[:-1]}"), "predict returned 255 values of 'p' for 256 rows"),
        (returning("{'p': logits.sum().numpy()}"), "predict returned a single value of 'p' for 256 rows"),
        (returning("{3: logits.numpy()}"), "a column named 3; a text was expected"),
        (returning("{'id': logits.numpy()}"), "predict returned 'id', which is also a column that is kept"),
        (returning("{'p': np.array([object()] * len(logits))}"), "which Parquet cannot hold"),
        (returning("{'p': np.array([None] * len(logits))}"), "nothing but None in the first batch"),
        (SCRIPT.replace('"x"', '"y"'), "there is no column 'y' in the data; there are id, x, name, image"),
        (SCRIPT.replace("def predict", "def infer"), "predict.py has no function predict; it must define"),
        (SCRIPT.replace("import torch", "import trch", 1), "cannot be imported: ModuleNotFoundError: No module named"),
        (SCRIPT.replace("return nn.Seq", "return 1 or nn.Seq"), "returned a int; it must define"),
        (SCRIPT.replace("return nn.Seq", "1 / 0; return nn.Seq"), "make_model: predict.py line 7: ZeroDivisionError"),
        (SCRIPT.replace("nn.BatchNorm1d(3)", "nn.ReLU()"), "the model lacks 5 tensors (1.bias, 1.num_batches_tracked,"),
        (SCRIPT.replace(", nn.Batch", ", nn.Linear(3, 3), nn.Batch"), "the checkpoint lacks 5 tensors (2.bias"),
        (SCRIPT.replace("(4, 3)", "(5, 3)"), "0.weight is (3, 5), saved was (3, 4). Make it as the training"),
    ],
)
def test_a_script_that_cannot_work_is_answered_with_why(complaint: Callable[..., str], script: str, said: str) -> None:
    assert said in complaint(script=script)


def test_a_script_that_failed_before_the_first_part_may_be_mended(
    complaint: Callable[..., str], predict: Predict
) -> None:
    assert "has no 'teacher'" in complaint("--model", "teacher")
    assert "empty dict" in complaint(script=returning("{}"))
    assert predict() == 0
    assert pq.read_table("out")["id"].to_pylist() == list(range(5700))


def test_a_bad_row_is_found(complaint: Callable[..., str]) -> None:
    bad = SCRIPT.replace("logits = ", "if 5123 in batch['id']: raise ValueError('no image')\n    logits = ")
    assert "row 123 of deep/b.parquet: predict.py line 11: ValueError: no image" in complaint(script=bad)


def test_a_batch_that_fails_only_as_a_whole_is_named(complaint: Callable[..., str]) -> None:
    bad = SCRIPT.replace("logits = ", "if len(batch['id']) > 90 and 2650 in batch['id']: 1 / 0\n    logits = ")
    said = complaint("--batch-size", "100", script=bad)
    assert "rows 2,600 to 2,699 of a.parquet: predict.py line 11: ZeroDivisionError: division by zero" in said


def test_columns_must_not_change_between_batches(complaint: Callable[..., str], tmp_path: Path) -> None:
    as_double = returning("{'p': logits.numpy().astype('f8' if 2500 in batch['id'] else 'f4')}")
    said = complaint(script=as_double)
    assert "'p' as fixed_size_list<element: double>[3]; before it was fixed_size_list<element: float>[3]" in said
    assert "rows 2,500 to 2,755 of a.parquet" in said
    assert parts() == ["part-000000.parquet"]


def test_a_column_may_be_all_none_in_a_later_batch(predict: Predict) -> None:
    script = returning("{'p': np.array([None if i > 2499 else 'yes' for i in batch['id']])}")
    assert predict(script=script) == 0
    assert pq.read_table("out")["p"].to_pylist() == ["yes"] * 2500 + [None] * 3200


def test_a_row_group_that_is_too_large_is_cut(predict: Predict, data: Path) -> None:
    table = rows(70_000)
    pq.write_table(table, data.parent / "large.parquet", row_group_size=70_000)
    assert predict("--data", str(data.parent / "large.parquet"), "--batch-size", "4096") == 0
    assert len(parts()) == 3
    assert pq.read_table("out")["id"].to_pylist() == list(range(70_000))


@pytest.mark.parametrize("address", ["file://{}", "local://{}"])
def test_data_is_read_from_any_address(predict: Predict, data: Path, address: str) -> None:
    assert predict("--data", address.format(data)) == 0
    assert pq.read_table("out")["id"].to_pylist() == list(range(5700))


def test_an_object_store_takes_the_output(predict: Predict, capsys: pytest.CaptureFixture[str]) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pseudo_dirs[:], _ = [""], store.store.clear()
    assert predict(output="memory://bucket/out") == 0
    store.rm("/bucket/out/part-000001.parquet")
    assert predict(output="memory://bucket/out") == 0
    assert predict(output="memory://bucket/out") == 0
    assert "finished before" in capsys.readouterr().out
    ids = [pq.read_table(store.open(f"/bucket/out/part-{number:06d}.parquet"))["id"].to_pylist() for number in range(3)]
    assert [each for part in ids for each in part] == list(range(5700))


def test_what_is_not_there_or_not_parquet_is_named(complaint: Callable[..., str], data: Path, tmp_path: Path) -> None:
    assert "there is no nowhere; --data names a Parquet file, or a folder" in complaint("--data", "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty has no .parquet file in it" in complaint("--data", "empty")
    (data / "c.parquet").write_text("this is no Parquet")
    assert "c.parquet of" in (said := complaint()) and "cannot be read as Parquet" in said
    pq.write_table(rows(10).drop_columns(["image"]), data / "c.parquet")
    assert "c.parquet has column 'image' not, a.parquet has it as binary" in complaint()
    (data / "c.parquet").unlink()
    pq.write_table(rows(0), tmp_path / "none.parquet")
    assert "has no rows" in complaint("--data", "none.parquet")
    assert "cannot be opened" in complaint("--data", "nosuch://bucket")


def test_rows_that_cannot_be_read_are_named(complaint: Callable[..., str], data: Path) -> None:
    content = bytearray((data / "a.parquet").read_bytes())
    start = pq.read_metadata(data / "a.parquet").row_group(1).column(2).data_page_offset
    content[start : start + 400] = b"\xff" * 400
    (data / "a.parquet").write_bytes(content)
    assert "rows 2,500 to 4,999 of a.parquet cannot be read" in complaint()


@pytest.mark.skipif(os.getuid() == 0, reason="root may read and write everything")
def test_no_permission_is_one_line(complaint: Callable[..., str], data: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "cannot be written (Permission denied); give another --output" in complaint(output="locked/out")
    (data / "a.parquet").chmod(0)
    assert "a.parquet" in (said := complaint()) and "permission denied" in said


def test_an_output_that_is_not_ours_is_left_alone(complaint: Callable[..., str], tmp_path: Path, data: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("")
    assert "out is not empty (it has thesis.txt), and no prediction was begun there" in complaint()
    assert "lies in --data" in complaint(output=str(data / "out"))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in complaint(output="file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "_prediction.json").write_text('{"format": 2}')
    assert "its format is 2, this keepstep's is 1" in complaint(output="other")


def test_two_at_once_are_refused(complaint: Callable[..., str], tmp_path: Path) -> None:
    from keepstep.predict.output import FolderOutput

    with FolderOutput(str(tmp_path / "out")).held():
        assert "is being written by another process" in complaint()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checkpoint", "7"], "there is no checkpoint '7'; there are steps 3"),
        (["--checkpoint", "best"], "the run kept no best checkpoint"),
        (["--model", "teacher"], "the checkpoint has no 'teacher'; it has model"),
        (["--keep", "label"], "--keep names 'label', which the data has not; it has id, x, name, image"),
        (["--batch-size", "0"], "--batch-size is 0; at least 1"),
        (["--workers", "0"], "--workers is 0; at least 1"),
        (["--storage", "elsewhere"], "there is no run 'a' in elsewhere"),
    ],
)
def test_bad_flags_are_named(complaint: Callable[..., str], words: list[str], said: str) -> None:
    assert said in complaint(*words)
    assert not Path("out").exists() or words == ["--model", "teacher"]


def test_a_script_that_is_not_there_is_named(complaint: Callable[..., str], predict: Predict) -> None:
    assert "there is no script infer.py; there are predict.py" in complaint("--with", "infer.py")


def test_few_rows_and_a_machine_without_ray_need_none(
    predict: Predict, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("keepstep.predict.command.importlib.util.find_spec", lambda name: None)
    assert predict("--workers", "2", "--data", str(data / "deep")) == 0
    assert "so few rows that they are predicted in this process" in capsys.readouterr().err
    assert predict("--workers", "2", output="all") == 0
    assert "--workers 2 needs Ray" in capsys.readouterr().err
    assert predict("--address", "auto", output="none") == 2
    assert "--address auto needs Ray: pip install 'keepstep[ray]'" in capsys.readouterr().err


def test_what_a_module_keeps_beside_tensors_is_loaded_too(tmp_path: Path) -> None:
    from keepstep.predict.model import load_weights

    class Scaled(nn.Linear):
        scale = 1.0

        def get_extra_state(self) -> dict[str, Any]:
            return {"scale": self.scale, "shift": torch.full((2,), self.scale)}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.scale, self.shift = state["scale"], state["shift"]

    saved = Scaled(2, 2)
    saved.scale = 3.0
    save(tmp_path, 1, model=saved.state_dict())
    model = Scaled(2, 2)
    load_weights(model, Store(tmp_path / "runs" / "a" / "checkpoints", keep=5), 1, "model")
    assert model.scale == 3.0 and model.shift.tolist() == [3.0, 3.0]
    assert torch.equal(model.weight, saved.weight)
