"""npuDeviceIds on a CPU: shares of its cores, also where the file is of a larger machine."""

import os
import re

import pytest

from kvloom.server.config.devices import device_settings, devices_note, share_of
from kvloom.server.config.settings import load_settings
from tests.server.config.test_config import SEED_LAYOUT, changed, write


def test_devices_of_a_cpu_are_shares_of_its_cores():
    assert [share_of(range(8), device, 3) for device in range(3)] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert device_settings([[0]], 0, "cpu") == {}
    assert device_settings([[2, 0]], 0, "cuda") == {"device_ids": (2, 0)}
    assert device_settings([[7]], 0, "cpu") == {}, "one device has all cores, whatever its number"


@pytest.mark.parametrize("devices", [[list(range(1024))], [[device] for device in range(1000)]])
def test_a_file_of_a_larger_machine_is_served_in_one_process_a_model(devices):
    assert device_settings(devices, 0, "cpu") == {"world_size": 1}
    assert re.fullmatch(r"npuDeviceIds: names \d+ devices, .* each model has one process", devices_note(devices, "cpu"))
    assert devices_note(devices, "cuda") == devices_note([[0]], "cpu") == ""


def test_one_models_devices_may_be_a_flat_list(tmp_path):
    """As the tuning guide's table writes them (spec 2.3.2)."""
    path = write(tmp_path, changed(SEED_LAYOUT, "ModelDeployParam.npuDeviceIds", [0]))
    assert load_settings(path)["device_ids"] == [[0]]


def test_each_model_has_the_devices_of_its_list():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared")
    half = len(cores) // 2
    shares = [device_settings([[0], [1]], index, "cpu")["rank_cores"] for index in (0, 1)]
    assert shares == [(tuple(cores[:half]),), (tuple(cores[half:]),)]
