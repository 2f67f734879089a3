"""Code of a client sees a run of one process, whatever the run has."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Trainer as LightningTrainer
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from stateful_modules import Stateful
from torchmetrics import MeanMetric, SumMetric

import pl_fed
from pl_fed.samplers import All
from pl_fed.tasks import LightningTask
from pl_fed.tasks.metric_values import keep_local
from pl_fed.tasks.one_process import one_process
from pl_fed.types import Batch


@pytest.fixture
def group(tmp_path):
    """A process group, of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_other_processes_are_hidden(group):
    ones = torch.ones(2)
    with one_process():
        assert not dist.is_initialized()
        assert torch.equal(_sync_ddp_if_available(ones, reduce_op="sum"), ones)
        with pytest.raises(ValueError, match="process group has not been initialized"):
            dist.all_reduce(ones)
    assert dist.is_initialized()
    dist.all_reduce(ones)


def test_parts_of_a_client_s_metric_stay_in_its_process(group):
    metric = MeanMetric() + SumMetric()
    keep_local(metric)
    metric.update(torch.tensor([1.0, 3.0]))
    with mock.patch("torchmetrics.metric.gather_all_tensors", side_effect=AssertionError):
        assert float(metric.compute()) == 6.0


def test_trainer_speaks_of_one_process(group, tmp_path):
    federation = pl_fed.Federation(All())
    trainer = pl_fed.Trainer(federation, run_dir=tmp_path, accelerator="cpu", logger=False)
    names = ("world_size", "num_devices", "is_global_zero", "global_rank", "local_rank")
    with mock.patch.object(LightningTrainer, "world_size", 2):
        with mock.patch.object(LightningTrainer, "is_global_zero", False), one_process():
            assert [getattr(trainer, name) for name in names] == [1, 1, True, 0, 0]
        assert trainer.world_size == 2


def test_loggers_write_in_the_first_process_alone(group, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    with mock.patch.object(rank_zero_only, "rank", 1), one_process():
        logger.experiment.add_scalar("a", 1.0)
        assert rank_zero_only(int)() is None
    assert not any(tmp_path.rglob("events*"))


def test_processes_are_visible_again_after_an_error(group):
    with pytest.raises(KeyError), one_process():
        raise KeyError
    assert dist.is_initialized()


class Gathering(Stateful):
    """Notes for each step and hook of an evaluation whether it sees other processes."""

    def keep(self):
        self.sees = []

    def note(self, *_):
        self.sees.append(dist.is_initialized())

    on_validation_start = on_validation_epoch_start = on_validation_epoch_end = note
    validation_step = note


def test_steps_and_hooks_of_an_evaluation_see_one_process(group):
    net = Gathering().eval()
    LightningTask().evaluate(net, [Batch(torch.zeros(1, 4), torch.zeros(1))], "val")
    assert net.sees == [False] * 4


def test_run_of_one_process_is_left_as_it_is():
    before = dist.is_initialized
    with one_process():
        assert dist.is_initialized is before
