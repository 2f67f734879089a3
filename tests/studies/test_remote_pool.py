"""Runs beyond this machine: a Ray cluster of two nodes, and submitit's local jobs."""

import os
import signal
import time

import pytest
import yaml
from further_cases import mark_others
from study_processes import run
from tables import table_test

from pl_fed.studies.ray_pool import RayPool
from pl_fed.studies.readers import StudyError
from pl_fed.studies.remote_pool import Remote, read_remote
from pl_fed.studies.scratch_pool import ScratchPool
from pl_fed.studies.study import Study

TINY = {
    "trainer.max_epochs": 3,
    "trainer.logger": False,
    "data.num_clients": 6,
    "data.batch_size": 100,
    "federation.sampler.cohort_size": 3,
}
STUDY = {
    "name": "remote",
    "base": ["quickstart", TINY],
    "axes": {"algorithm": ["Ditto", "FedAvg"]},
    "seeds": 2,
    "options": {"folder": "study", "workers": 2},
}


@table_test(
    "value, expected",
    [
        (None, None),
        ("ray", Remote("ray", {})),
        ({"ray": {"gpus": 0.25}}, Remote("ray", {"gpus": 0.25})),
        ({"slurm": {"slurm_partition": "gpu"}}, Remote("slurm", {"slurm_partition": "gpu"})),
    ],
)
def test_engines(value, expected):
    assert read_remote("options.on", value) == expected


@table_test(
    "value, match",
    [
        ("kubernetes", "`options.on` to have only the keys ray, slurm but got kubernetes"),
        ({"ray": {}, "slurm": {}}, "`options.on` to be one of ray, slurm"),
        (
            {"ray": {"gpu": 1}},
            "`options.on.ray` to have only the keys address, cpus, gpus, scratch",
        ),
        ({"ray": {"scratch": "here"}}, "`options.on.ray.scratch` to be the absolute path"),
        ({"ray": {"scratch": True}}, "`options.on.ray.scratch` to be the absolute path"),
        (3, "`options.on` to be a mapping"),
    ],
)
def test_wrong_engines_are_one_sentence(value, match):
    with pytest.raises(StudyError, match=match):
        read_remote("options.on", value)


def test_idle_ray_pool_waits_for_cells_of_other_processes(monkeypatch):
    """It runs nothing itself: a return at once would read their locks without a pause."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    pool = RayPool.__new__(RayPool)
    pool._pending = {}
    assert pool.wait(0.5) == []
    assert pauses == [0.5]


def write(folder, **changes):
    (folder / "study.yaml").write_text(yaml.safe_dump({**STUDY, **changes}))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The table of the same study on this machine."""
    folder = tmp_path_factory.mktemp("here")
    write(folder)
    status, output = run(["study.yaml"], folder)
    assert status == 0, output
    return (folder / "study" / "results.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("cluster_of_jobs", mark_others(["debug", "local"], "debug"))
def test_jobs_of_submitit_give_the_same_table(tmp_path, cluster_of_jobs):
    """A local job starts an interpreter, and so takes ten times as long as one in this process."""
    pytest.importorskip("submitit")
    tables, remote = [], {"on": {"slurm": {"cluster": cluster_of_jobs}}}
    for folder, place in {"here": {}, "jobs": remote}.items():
        options = {**STUDY["options"], "folder": folder, **place}
        write(tmp_path, options=options, axes={"algorithm": ["Ditto"]}, seeds=1)
        status, output = run(["study.yaml"], tmp_path)
        assert status == 0, output
        tables.append((tmp_path / folder / "results.csv").read_text())
    assert tables[0] == tables[1]
    assert tables[0].splitlines()[1].startswith("Ditto,0,done")


@pytest.mark.slow
def test_slurm_without_a_cluster_is_one_sentence(tmp_path):
    pytest.importorskip("submitit")
    write(tmp_path)
    status, output = run(["study.yaml", "--on", "slurm"], tmp_path)
    assert status == 1
    assert "`options.on.slurm` to be parameters of a cluster" in output


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of two nodes with one CPU each, on this machine."""
    pytest.importorskip("ray", reason="`options.on: ray` uses it")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def find_workers():
    """Return the ids of the processes that run jobs of studies."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                found += [int(name)] if b"Worker.do" in file.read() else []
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_ray_cluster_gives_the_same_table_also_after_a_killed_worker(
    tmp_path, cluster, expected, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    killed = []

    def kill_once(event):
        workers = find_workers()
        if workers and not killed and event.running == 2:
            time.sleep(1)
            os.kill(workers[0], signal.SIGKILL)
            killed.append(workers[0])

    options = {**STUDY["options"], "on": {"ray": {"address": cluster.address}}}
    study = Study(**{**STUDY, "options": options})
    rows = study.run(report=kill_once)
    assert killed
    assert [row["status"] for row in rows] == ["done"] * 4
    assert (tmp_path / "study" / "results.csv").read_bytes() == expected


@pytest.mark.slow
def test_ray_cluster_without_a_shared_folder_brings_results_home(tmp_path, cluster, monkeypatch):
    """A run that is killed resumes from the checkpoint that came home, with the same numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ScratchPool, "check_seconds", 0.1)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"trainer": {"max_epochs": 60}}))
    long = {**TINY, "trainer.check_val_every_n_epoch": 60}
    del long["trainer.max_epochs"]
    settings = {**STUDY, "base": ["quickstart", "own.yaml", long], "seeds": 1}
    here = {**STUDY["options"], "folder": "here"}
    Study(**{**settings, "options": here}).run()
    folder, killed = tmp_path / "study", []

    def kill_once(event):
        saved = sorted(folder.glob("algorithm=*/seed=0/checkpoints/last.ckpt"))
        if len(saved) == 2 and not killed:
            workers = find_workers()
            os.kill(workers[0], signal.SIGKILL)
            killed.append(workers[0])

    options = {"ray": {"address": cluster.address, "scratch": str(tmp_path / "scratch")}}
    study = Study(**{**settings, "options": {**STUDY["options"], "on": options}})
    rows = study.run(report=kill_once)
    assert killed
    assert [row["status"] for row in rows] == ["done"] * 2
    expected = (tmp_path / "here" / "results.csv").read_bytes()
    assert (folder / "results.csv").read_bytes() == expected
    config = yaml.safe_load((folder / "algorithm=Ditto/seed=0/config.yaml").read_text())
    assert config["trainer"]["default_root_dir"].startswith(str(tmp_path / "scratch"))
    scratch = [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    assert not [path for path in scratch if path.parent.name != ".locks"]
    logs = [path.read_text() for path in folder.glob("algorithm=*/seed=0/log.txt")]
    assert sum("Restored all states" in text for text in logs) == 1
    assert not list(folder.rglob("*.ckpt"))


@pytest.mark.slow
def test_a_folder_that_no_machine_can_write_is_one_sentence(tmp_path, cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    options = {"ray": {"address": cluster.address, "scratch": str(tmp_path / "file")}}
    study = Study(**{**STUDY, "options": {**STUDY["options"], "on": options}})
    with pytest.raises(StudyError) as refusal:
        study.run()
    sentence = str(refusal.value)
    assert "`options.on.ray.scratch` to be a folder that each machine can write but" in sentence
    assert "\n" not in sentence


@pytest.mark.slow
def test_ray_without_room_or_cluster_is_one_sentence(tmp_path, cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, match in (
        ({"address": cluster.address, "gpus": 1}, "room for a run of 1 CPUs and 1 GPUs"),
        ({"address": "127.0.0.1:1"}, "address` to be that of a running cluster"),
    ):
        study = Study(**{**STUDY, "options": {"folder": "other", "on": {"ray": options}}})
        with pytest.raises(StudyError, match=match):
            study.run()
        import ray

        ray.shutdown()
