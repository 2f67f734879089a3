"""Export of adapters for peft: a loaded model has the logits of the exported client."""

import json

import pytest
import torch
import yaml

from pl_fed.command.main import main
from pl_fed.exports.peft_adapter import PeftAdapter
from pl_fed.models import LoRA

peft = pytest.importorskip("peft", reason="needs adapters")
pytest.importorskip("datasets", reason="needs Hugging Face data")
transformers = pytest.importorskip("transformers", reason="needs Hugging Face models")
from hugging_face_models import texts, tiny, write_texts  # noqa: E402

pytestmark = pytest.mark.slow

transformers.logging.set_verbosity_error()


def fit(folder, algorithm="Ditto"):
    """Run two rounds of adapters on a saved body, and return the run's folder."""
    tiny().model.save_pretrained(folder / "body")
    write_texts(folder / "texts", sizes=(12, 12, 12))
    net = {"base": str(folder / "body"), "r": 2}
    config = {
        "seed_everything": 0,
        "model": {
            "class_path": f"pl_fed.clients.{algorithm}",
            "init_args": {
                "net": {"class_path": "pl_fed.models.LoRA", "init_args": net},
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
                "local_steps": 3,
            },
        },
        "data": {
            "dataset": {
                "class_path": "pl_fed.data.HuggingFace",
                "init_args": {"dataset": str(folder / "texts"), "client": "user"},
            },
        },
        "federation": {"engine": {"name": "one_by_one"}},
        "trainer": {
            "default_root_dir": str(folder / "runs"),
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
            "accelerator": "cpu",
            "enable_model_summary": False,
            "enable_progress_bar": False,
        },
    }
    config["federation"]["sampler"] = {"class_path": "pl_fed.samplers.All"}
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(folder / "c.yaml")])
    (run,) = (folder / "runs").iterdir()
    return run


def test_exported_adapters_load_in_peft_with_equal_logits(tmp_path, capsys):
    run = fit(tmp_path)
    clients = ["--client", "0", "2", "--global", "--format", "peft", "state_dict"]
    main(["export", "--ckpt", str(run), "--out", str(tmp_path / "out"), *clients])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [model["name"] for model in manifest["models"]] == ["global", "client_0", "client_2"]
    assert manifest["inputs"]["input_ids"] == {"shape": [6], "dtype": "int32"}
    inputs, logits = texts().inputs, []
    for model in manifest["models"]:
        folder = tmp_path / "out" / model["files"][0]
        names = {path.name for path in folder.iterdir()}
        assert names >= {"adapter_config.json", "adapter_model.safetensors"}
        body = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "body", num_labels=3
        )
        loaded = peft.PeftModel.from_pretrained(body, folder).eval()
        ours = LoRA(str(tmp_path / "body"), r=2, options={"num_labels": 3}).eval()
        state = torch.load(tmp_path / "out" / model["files"][1], weights_only=True)
        ours.load_state_dict(state)
        with torch.no_grad():
            outputs = loaded(**inputs).logits
            torch.testing.assert_close(outputs, ours(**inputs).logits, atol=1e-6, rtol=0)
        logits.append(outputs)
    with pytest.raises(SystemExit):
        main(["export", "--ckpt", str(run), "--client", "0", "--format", "torch_export"])
    assert "inputs to be one tensor for export as torch_export" in capsys.readouterr().err
    assert float((logits[1] - logits[2]).abs().max()) > 1e-4  # personal adapters


def test_other_nets_and_changed_bodies_are_refused(tmp_path):
    net = LoRA(tiny(), r=2)
    net.body_changes = True
    for other, message in (
        (net, "a body that training leaves unchanged for format peft"),
        (torch.nn.Linear(1, 1), "a net of pl_fed.models.LoRA for format peft but got Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            PeftAdapter(None).write(other, tmp_path)
