"""Tests of measure: peers alternate, wrong results are refused, failures are reported, and compare finds changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from simulated import SimulatedClock, results, workload

import partnets
from partbench.cli import main
from partbench.compare import changes
from partbench.measuring import timing
from partbench.measuring.timing import Batch, Missing, Plan, Run, Workload, measure
from partbench.peers.layer import THREE, Layer
from partbench.peers.models import Model
from partbench.suites import optim, speed
from partkernels.backend.cpu import operators as cpu
from partkernels.backend.dispatch import READY, backends

LAYERS = [Layer((3, 20), (8, 20)), Layer((2, 3, 6, 5), (4, 3, 3, 3), padding=1, stride=2)]
QUICK = Plan(passes=2, rounds=2)
needs_cpu = pytest.mark.skipif(backends()["cpu"] != READY, reason="the C++ backend was not built")


def test_every_round_has_each_peer_once_in_a_random_order():
    clock = SimulatedClock(0)
    measure([Batch([workload(a=1.0, b=2.0, c=3.0)], clock, Plan(passes=3, rounds=20, seconds=10))])
    assert len(clock.rounds) == 60
    orders = {tuple(call() for call in calls) for calls in clock.rounds}
    assert all(sorted(order) == [1.0, 2.0, 3.0] for order in orders)
    assert len(orders) == 6


def test_every_pass_draws_fresh_data():
    seeds = []
    fresh = Workload("speed", {}, lambda seed: seeds.append(seed), {"a": lambda _: Run(lambda: 1.0, lambda: None)})
    (record,) = measure([Batch([fresh], SimulatedClock(0), Plan(passes=4, rounds=2))])
    assert len(set(seeds)) == 4
    assert [len(rounds) for rounds in record.samples] == [2] * 4


def test_records_are_saved_before_the_first_pass_ends(monkeypatch):
    monkeypatch.setattr(timing, "SAVING", -1.0)
    saved, both = [], [workload(case={"number": n}, a=1.0, b=2.0) for n in (1, 2)]
    measure([Batch(both, SimulatedClock(0), Plan(passes=1, rounds=2))], save=saved.append)
    assert [len(records) for records in saved] == [2, 4, 4]
    assert all(record.samples for records in saved for record in records)


def test_a_missing_failing_or_wrong_peer_loses_only_its_own_figure():
    def missing(_):
        raise Missing("no such device")

    def failing(_):
        raise RuntimeError("broken")

    def right_at_first(seed):
        def check():
            if seed > 0:
                raise AssertionError("off by 0.5")

        return Run(lambda: 1.0, check)

    def check():
        raise AssertionError("off by 2")

    peers = dict(workload(good=1.0).peers)
    peers |= {
        "missing": missing,
        "failing": failing,
        "wrong later": right_at_first,
        "wrong": lambda _: Run(lambda: 1.0, check),
    }
    records = {
        record.peer: record
        for record in measure([Batch([Workload("speed", {}, int, peers)], SimulatedClock(0), QUICK)])
    }
    assert len(records["good"].samples) == 2
    assert records["missing"].missing == "no such device"
    assert records["failing"].missing == "failed: RuntimeError: broken"
    assert records["wrong"].refused == "off by 2"
    assert records["wrong later"].refused == "off by 0.5"
    assert not any(records[peer].samples for peer in records if peer != "good")


@needs_cpu
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.operator)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("defaults", ["zeros", "uniform", "normal", "stored"])
def test_all_peers_agree_with_the_reference(layer, dtype, defaults):
    layer, partitioning = dataclasses.replace(layer, dtype=dtype), dataclasses.replace(THREE, defaults=defaults)
    workloads = speed.workloads([layer], [partitioning], [1, 2, 3], ["cpu", "reference"], compiled=())
    records = measure([Batch(workloads, SimulatedClockOfNothing(), Plan(passes=1, rounds=2))])
    assert len(records) == 3 * (3 * 4 + 6)
    assert [record for record in records if record.refused or record.missing] == []


class SimulatedClockOfNothing(SimulatedClock):
    """A simulated clock for calls that return tensors."""

    def __init__(self) -> None:
        super().__init__(0)

    def round(self, calls):
        return [1.0 for call, _ in calls if call() is not self]


def off_by_a_thousandth(result, *_):
    result.view(-1)[-1] += 1e-3  # one entry
    return result


def off_by_a_fiftieth(result, *_):
    return 1.02 * result


def exchanged_elsewhere(exchange, tensors, places, *_):
    def run(*numbers):
        exchange(*numbers)
        for tensor, at in zip(tensors, places, strict=True):
            tensor[at[-1:].long()] += 0.1  # one entry

    return run


@needs_cpu
@pytest.mark.parametrize(
    ("work", "operator", "spoil"),
    [
        ("forward", "linear", off_by_a_thousandth),
        ("grad_input", "linear_grad_input", off_by_a_thousandth),
        ("grad_weight", "linear_grad_weight", off_by_a_thousandth),
        ("training", "subnetwork_weight_grad", off_by_a_fiftieth),
        ("training", "prepared", exchanged_elsewhere),
    ],
)
def test_a_kernel_made_wrong_is_refused(work, operator, spoil, monkeypatch):
    right = getattr(cpu, operator)
    monkeypatch.setattr(cpu, operator, lambda *arguments: spoil(right(*arguments), *arguments))
    workloads = speed.workloads(LAYERS[:1], [THREE], [1, 2], ["cpu"], works=[work], compiled=())
    for record in measure([Batch(workloads, SimulatedClockOfNothing(), Plan(passes=1, rounds=2))]):
        if record.peer == "partkernels cpu":
            assert record.refused and not record.samples
        else:
            assert record.samples


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda parameter, owned: parameter.sub_(1e-3), "other partitions have moved"),
        (lambda parameter, owned: parameter.sub_(owned * 1e-4), "not close"),
    ],
)
def test_an_optimiser_made_wrong_is_refused(step, reason, monkeypatch):
    @torch.no_grad()
    def wrong(self, entries, grads, update, group):
        for parameter, partition in zip(entries.parameters, entries.partitions, strict=True):
            step(parameter, partition.mask(update))

    monkeypatch.setattr(partnets.optim.Adam, "step_all", wrong)
    tiny = Model("layer", lambda: torch.nn.Linear(8, 8), (8,))
    workloads = optim.workloads([optim.Parameters(tiny)], [1])
    records = measure([Batch(workloads, SimulatedClockOfNothing(), Plan(passes=1, rounds=2))])
    (refused,) = [record for record in records if record.refused]
    assert (refused.peer, refused.case["optimizer"]) == ("partnets", "adam")
    assert reason in refused.refused


def test_a_kernel_slowed_by_a_fifth_is_flagged_and_the_rest_is_not(tmp_path, capsys):
    cases = [{"work": "waiting", "shape": str(i)} for i in range(40)]
    before = results(*(workload(case=case, dense=1e-3, ours=2e-3) for case in cases), seed=1)
    slowed = [workload(case=case, dense=1e-3, ours=2e-3 * (1.2 if i == 7 else 1)) for i, case in enumerate(cases)]
    after = results(*slowed, seed=2)
    paths = tmp_path / "before.json", tmp_path / "after.json"
    before.save(paths[0])
    after.save(paths[1])
    flagged = [each for each in changes(before, after) if each.mark]
    assert [(each.record.case["shape"], each.record.peer, each.mark) for each in flagged] == [("7", "ours", "slower")]
    assert flagged[0].relative == pytest.approx(0.2, abs=0.1)
    command = ["compare", *map(str, paths)]
    assert main(command) == 1
    assert "1 changed beyond noise" in capsys.readouterr().out
    assert main(["compare", str(paths[1]), str(paths[0])]) == 0, "faster is no failure"
    assert main(["compare", str(paths[0]), str(paths[0])]) == 0


def test_one_pass_has_no_interval_and_is_not_compared():
    once = Plan(passes=1, rounds=5, seconds=1)
    before, after = (results(workload(dense=1.0, ours=ours), plan=once) for ours in (1.0, 2.0))
    assert [each.mark for each in changes(before, after)] == ["", ""]


def test_figures_of_one_file_only_and_refused_ones_are_kept_in_a_comparison():
    before, after = results(workload(dense=1.0, ours=2.0, gone=3.0)), results(workload(dense=1.0, ours=2.0, new=3.0))
    after.records[1].refused, after.records[1].samples = "off by 1", []
    found = {each.record.peer: each for each in changes(before, after)}
    assert found["gone"].after is None and found["gone"].before
    assert found["new"].before is None and found["new"].after
    assert found["ours"].mark == "refused"
