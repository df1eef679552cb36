import importlib
import os
import sys
from pathlib import Path

import pytest

from assay.bench import ray_executor
from assay.bench.runner import execute
from assay.bench.store import Store
from assay.errors import InputError

pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group("ray")
sys.path.insert(0, str(Path(__file__).parent))
toys = importlib.import_module("toy_claims")
Work = toys.ToyWorkload


def numbers(run):
    return {(t.setting, t.replicate, t.arm): dict(t.metrics) for t in run.trials}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    store = tmp_path_factory.mktemp("here") / "t.sqlite"
    return numbers(execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=20))


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine, with one core each."""
    from ray.cluster_utils import Cluster

    quiet = {"include_dashboard": False, "object_store_memory": 100 * 2**20, "num_cpus": 1}
    nodes = Cluster(initialize_head=True, head_node_args=quiet)
    yield nodes
    nodes.shutdown()


def test_a_cluster_of_this_machine_gives_the_same_numbers(tmp_path, expected, capfd):
    told = []
    run = execute(
        toys.PLAIN,
        Work(),
        store=tmp_path / "t.sqlite",
        executor="ray",
        replicates=20,
        progress=lambda *a: told.append(a[0]),
    )
    assert numbers(run) == expected and told[-1] == 80
    assert not importlib.import_module("ray").is_initialized()
    assert capfd.readouterr().out == ""  # nothing of Ray's may get into --json


def test_what_goes_wrong_on_a_cluster(tmp_path):
    """In one cluster that somebody else started, which we leave running."""
    import ray

    switch = tmp_path / "switch"
    switch.touch()
    work = Work(switch=str(switch), settings=("one",))
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        store = tmp_path / "t.sqlite"
        run = execute(toys.DEADLY, work, store=store, executor="ray", scale="smoke")
        assert {(t.replicate, t.arm) for t in run.trials if t.status == "failed"} == {(1, "deadly")}
        assert "The worker process died" in run.select("one", "deadly")[1].error and len(run.trials) == 9

        run = execute(toys.TRICKY, work, store=store, executor="ray", scale="smoke", replicates=1)
        assert "ZeroDivisionError" in run.select("one", "flaky")[0].error
        assert run.select("one", "method")[0].status == "ok"

        with pytest.raises(InputError, match="shorter than the context"):
            execute(toys.PLAIN, Work(refuse=0), store=tmp_path / "none" / "t.sqlite", executor="ray", replicates=1)
        assert not (tmp_path / "none").exists()

        with pytest.raises(InputError, match="no node of the Ray cluster has the 64 CPU"):
            execute(toys.PLAIN, Work(), store=tmp_path / "none" / "t.sqlite", executor="ray", threads=64)

        run = execute(toys.RACING, Work(settings=("one",)), store=store, executor="ray", scale="smoke", replicates=1)
        assert run.select("one", "slow")[0].metrics["seconds"] >= 0.005 and len(run.trials) == 4
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_what_ray_prints_goes_to_a_log(capfd, caplog):
    inside = importlib.import_module("ray._private.worker")
    before = inside.print_to_stdstream
    with ray_executor._hushed(), caplog.at_level("INFO", "assay.ray"):
        inside.print_to_stdstream({"lines": ["A worker died"], "pid": "raylet"}, ignore_prefix=False)
    assert capfd.readouterr().out == "" and "A worker died" in caplog.text
    assert inside.print_to_stdstream is before


def test_an_address_where_there_is_nothing(tmp_path):
    for address in ("127.0.0.1:9", "auto"):
        with pytest.raises(InputError, match=f"executor '{address}': no Ray cluster can be reached"):
            execute(toys.PLAIN, Work(), store=tmp_path / "d" / "t.sqlite", executor=address)
    assert not (tmp_path / "d").exists()


def children(pid):
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(stat.parent.name))
        except OSError:
            continue
    return found


def test_a_node_that_dies_in_mid_run_changes_nothing(tmp_path, expected, cluster):
    other = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    (raylet,) = other.all_processes["raylet"]
    log = tmp_path / "log"
    store = tmp_path / "t.sqlite"
    state = {}

    def progress(done, total, label):
        workers = children(raylet.process.pid) if not state else set()
        there = {int(line.split()[2]) for line in log.read_text().splitlines()} if log.exists() else set()
        if not state and done >= 10 and workers & there:  # the node has done some of the work
            state.update(done=done, total=total, lines=len(there))
            cluster.remove_node(other, allow_graceful=False)

    run = execute(
        toys.PLAIN,
        Work(nap=0.05, log=str(log)),
        store=store,
        executor=cluster.address,
        replicates=20,
        progress=progress,
    )
    assert state and 10 <= state["done"] < state["total"] == 80
    assert all(t.status == "ok" for t in run.trials) and numbers(run) == expected
    assert len(Store(store).done(run.key)) == 80


def test_a_job_is_sent_again_whole_then_in_parts_then_given_up():
    from assay.bench.worker import Job

    recorded = []
    driver = object.__new__(ray_executor._Driver)
    driver._record = lambda job, trials: recorded.extend(trials)
    job = Job("one", 0, ("a", "b"), (("speed", ("c", "d")),))
    assert driver._after_loss(job, 1) == [(job, 1)]
    parts = driver._after_loss(job, 2)
    assert [p.names for p, _ in parts] == [
        (("one", 0, "a"),),
        (("one", 0, "b"),),
        (("one", 0, "c"), ("one", 0, "d")),
    ]
    assert driver._after_loss(parts[0][0], 3) == [(parts[0][0], 3)] and recorded == []
    assert driver._after_loss(parts[2][0], 4) == []
    assert [(t.arm, t.status) for t in recorded] == [("c", "failed"), ("d", "failed")]
    assert driver._after_loss(Job("one", 0), 1) == []
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
