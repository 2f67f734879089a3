"""A frozen torchvision body under a new head."""

from urllib.error import URLError

import pytest
import torch
from tables import table_test
from torchvision.models import resnet18

from pl_fed.clients import Ditto
from pl_fed.models import FrozenBody


@pytest.fixture
def net():
    return FrozenBody("resnet18", num_classes=7)


@pytest.mark.slow
def test_only_the_head_is_trained(net):
    trainable = {name: p.numel() for name, p in net.named_parameters() if p.requires_grad}
    assert trainable == {"head.weight": 512 * 7, "head.bias": 7}
    net(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in net.parameters())


@pytest.mark.slow
def test_one_channel_is_repeated(net):
    image = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(net(image), net(image.expand(-1, 3, -1, -1)))


@pytest.mark.slow
def test_weights_from_a_file(tmp_path):
    torch.manual_seed(1)
    body = resnet18(weights=None)
    torch.save(body.state_dict(), tmp_path / "resnet18.pth")
    loaded = FrozenBody("resnet18", str(tmp_path / "resnet18.pth"))
    assert torch.equal(loaded.body.conv1.weight, body.conv1.weight)
    assert not torch.equal(FrozenBody("resnet18").body.conv1.weight, body.conv1.weight)


def test_body_is_shared_and_stays_in_evaluation_mode(net):
    client = Ditto(net).train()
    assert client.personal_model.body is client.global_model.body
    assert client.personal_model.head is not client.global_model.head
    assert not client.global_model.body.bn1.training
    assert client.row("global").data.numel() == 512 * 7 + 7


@table_test("arguments", [{"architecture": "resnet1"}, {"weights": "MINE"}])
def test_unknown_names_are_refused(arguments):
    with pytest.raises(ValueError, match="Expected arguments `architecture` and `weights`"):
        FrozenBody(**arguments)


@pytest.mark.slow
def test_absent_weights_have_several_names():
    assert all(
        FrozenBody(weights=weights).head.in_features == 512 for weights in (None, "none", "None")
    )


def test_failed_download_of_weights_is_reported(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr("torch.hub.urlopen", offline)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    expected = "`weights` to be weights that can be downloaded but got 'DEFAULT' .*no route.*a file"
    with pytest.raises(ValueError, match=expected):
        FrozenBody(weights="DEFAULT")


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"no weights", {"weight": torch.ones(2)}, [1.0]])
def test_file_without_weights_is_refused(content, tmp_path):
    file = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match="`weights` to be a file with the state dict of resnet18"):
        FrozenBody(weights=str(file))


def test_architecture_without_a_linear_layer_is_refused():
    with pytest.raises(ValueError, match="`architecture` to be a classifier with a linear last"):
        FrozenBody("squeezenet1_0")


def test_zero_classes_are_refused():
    with pytest.raises(ValueError, match="Expected argument `num_classes` to be at least 1 but"):
        FrozenBody(num_classes=0)
