"""The pretend device refuses what a GPU refuses, and computes what the CPU computes."""

import json

import pytest

pytestmark = pytest.mark.slow

REFUSED = """
import json, sys
sys.path.insert(0, "tests/devices")
import pretend_device
pretend_device.install()
import torch
a, on_cpu = torch.randn(3, 4, device="cuda"), torch.ones(3, 4)
index, on_device = torch.tensor([0]), torch.tensor([0], device="cuda")
calls = {
    "add": lambda: a + on_cpu, "mm": lambda: a @ on_cpu.T, "cat": lambda: torch.cat([a, on_cpu]),
    "where": lambda: torch.where(a > 0, a, on_cpu), "out": lambda: torch.add(a, a, out=on_cpu),
    "index_select": lambda: a.index_select(0, index), "index": lambda: on_cpu[on_device],
    "index_add": lambda: on_cpu.index_add_(0, on_device, on_cpu[:1]),
    "generator": lambda: a.normal_(generator=torch.Generator()), "numpy": lambda: a.numpy(),
}
refused = {}
for name, call in calls.items():
    try:
        call()
    except (RuntimeError, TypeError) as error:
        refused[name] = str(error)
module = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
                             torch.nn.Linear(64, 3))
x = torch.randn(5, 2, 6, 6)
expected = module(x)
expected.sum().backward()
gradient = module[0].weight.grad.clone()
module.zero_grad()
module.cuda()
outputs = module(x.cuda())
outputs.sum().backward()
torch.cuda.set_sync_debug_mode("error")
try:
    outputs.sum().item()
except RuntimeError as error:
    refused["item"] = str(error)
torch.cuda.set_sync_debug_mode("default")
with pretend_device.counting() as counts:
    (a + 1).sum().item()
    a[a > 0]
print(json.dumps({
    "refused": sorted(refused), "calls": sorted([*calls, "item"]),
    "scalar": str((a * torch.tensor(2.0)).device),
    "outputs": float((outputs.cpu() - expected).abs().max()),
    "gradients": float((module[0].weight.grad.cpu() - gradient).abs().max()),
    "waits": sorted(reason for reason, _ in counts.waits), "launches": counts.launches,
}))
"""


def test_device_refuses_what_cuda_refuses(run_script):
    done = run_script("", "-c", REFUSED)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["refused"] == result["calls"]
    assert result["scalar"] == "cuda:0"
    assert result["outputs"] == 0.0
    assert result["gradients"] <= 1e-6
    assert result["waits"] == ["boolean mask: aten::index.Tensor", "item"]
    assert result["launches"]["aten::add.Tensor"] == 1
    assert result["launches"]["copy to host"] == 1


def test_planted_faults_are_found(compare):
    rows = compare("planted faults")["rows"]
    rooms = {"client", "aggregator", "evaluator", "store", "adversary", "metric"}
    assert rows.keys() == rooms
    for room, row in rows.items():
        assert row["cpu"] == "", f"{room} fails on the CPU, too: {row['cpu']}"
        assert "device" in row["device"], f"nobody found the fault in the room {room}: {row}"
