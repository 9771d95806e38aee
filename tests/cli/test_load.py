import pytest
from safetensors.torch import save_model

from cli.conftest import TINY
from hocket import zoo
from hocket.cli import parser
from hocket.loading import loader, open_weights


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "mlp.safetensors"
    save_model(zoo.load("mlp", width=16, depth=2, seed=5).model, str(path))
    return path


def test_the_first_step_runs_on_the_weights_of_the_file(hocket, weights):
    found = hocket("load", *TINY, weights, "--format", "json").fine()
    assert found.json["tensors"] == len(open_weights(weights).tensors)
    assert found.json["bytes"] == open_weights(weights).size_bytes
    assert found.json["first_step_s"] > 0
    assert "reordered" not in found.json


def test_the_file_is_written_in_the_order_of_use(hocket, weights, tmp_path):
    found = hocket("load", *TINY, weights, "--reorder", tmp_path / "ordered.safetensors").fine()
    assert "the next step" in found.out
    assert "ordered.safetensors" in found.out
    ordered = open_weights(tmp_path / "ordered.safetensors")
    assert ordered.is_in_first_use_order
    assert [name.rpartition(".")[0] for name in ordered.tensors] == ["0", "0", "2", "2", "4", "4"]
    assert hocket("load", *TINY, tmp_path / "ordered.safetensors").status == 0


def test_what_does_not_fit_is_told_in_one_line(hocket, weights, tmp_path):
    found = hocket("load", "mlp", weights)
    assert (found.status, "Error(s) in loading state_dict" in found.error) == (1, True)
    found = hocket("load", *TINY, tmp_path / "none")
    assert (found.status, "no such file" in found.error) == (2, True)
    (tmp_path / "bad").write_bytes(b"PK")
    found = hocket("load", *TINY, tmp_path / "bad")
    assert (found.status, "expected a safetensors file" in found.error) == (1, True)
    found = hocket("load", "dcgan", weights)
    assert (found.status, "it has 2 models, and load takes one" in found.error) == (1, True)


def test_an_index_may_stand_for_its_files(hocket, tmp_path):
    model = zoo.load("mlp", width=16, depth=2, seed=5).model
    save_model(model, str(tmp_path / "model.safetensors"))
    found = hocket("load", *TINY, tmp_path, "--order", "file", "--format", "json").fine()
    assert found.json["bytes"] == sum(tensor.nbytes for tensor in model.state_dict().values())


def test_the_orders_are_those_of_the_function():
    assert parser._LOAD_ORDERS == loader.ORDERS
