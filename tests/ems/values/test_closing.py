"""A closed KvPool says so, in a forked child too."""

import os

import pytest

import ems
from ems import EmsErrorCode, EmsException
from tests.ems.values.test_values import a_config


def test_a_closed_pool_says_so(agent):
    with ems.open_pool(a_config(), socket=agent.config.socket) as pool:
        pool.put(["a"], [b"1"])
    for call in (
        lambda: pool.put(["a"], [b"1"]),
        lambda: pool.get(["a"], [bytearray(1)]),
        lambda: pool.exists(["a"], [1]),
        lambda: pool.async_put(["a"], [b"1"]),
    ):
        with pytest.raises(EmsException) as caught:
            call()
        assert caught.value.status_code() == EmsErrorCode.EMS_IO_ERROR
        assert caught.value.message() == "the pool was closed"
    assert not pool.is_healthy()
    pool.close()


def test_a_closed_pool_stays_closed_in_a_forked_child(agent):
    with ems.open_pool(a_config(), socket=agent.config.socket) as pool:
        pool.put(["a"], [b"1"])
    child = os.fork()
    if child == 0:
        os._exit(int(pool.is_healthy()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child's pool answers"
