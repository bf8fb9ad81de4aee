"""Apps that pass invalid arguments or run out of resources get documented codes, no signal and no leak."""

import pytest

from tests.support.gewu.daemons import ABI, compile_c, compile_with_library, drive_program, run_program
from tests.support.gewu.service import Peer, Service
from tests.support.waiting import until

ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREAD = ("-fsanitize=thread",)


def test_what_no_careful_app_passes(start_daemon, model, tmp_path):
    program = compile_with_library(ABI / "hostile" / "input.c", *ADDRESS, "-DGEWU_MAX_ID=1100")
    daemon = start_daemon({"rate": 1e6})
    run_program(program, daemon, str(model), timeout_s=120)
    until(lambda: daemon.status()["sessions"] == [])


@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address", "thread"])
def test_an_app_that_is_interrupted_all_the_time(daemon, model, tmp_path, flags):
    run_program(compile_with_library(ABI / "hostile" / "storm.c", *flags), daemon, str(model), "30")


def test_an_app_that_is_out_of_descriptors(daemon, model, tmp_path):
    run_program(compile_c(ABI / "hostile" / "descriptors.c"), daemon, str(model))


@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address", "thread"])
def test_a_thousand_sessions(start_daemon, model, tmp_path, flags):
    daemon = start_daemon({"rate": 200})
    run_program(compile_with_library(ABI / "hostile" / "many.c", *flags), daemon, str(model), timeout_s=120)
    until(lambda: daemon.status()["sessions"] == [])


def test_no_signal_when_the_service_goes_away_under_a_large_request(model, tmp_path):
    def script(peer: Peer) -> None:
        peer.create()
        peer.sock.recv(1)
        peer.sock.close()

    service = Service(tmp_path / "gewu.sock", script)
    run_program(compile_with_library(ABI / "hostile" / "broken.c", *ADDRESS), service, str(model))
    service.join()
    service.close()


@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address", "thread"])
def test_a_service_that_is_stopped_and_goes_on_is_clean_under_sanitizers(start_daemon, model, tmp_path, flags):
    daemon = start_daemon({"rate": 20})
    program = compile_with_library(ABI / "hostile" / "frozen.c", *flags)

    def settled() -> bool:
        sessions = daemon.status()["sessions"]
        return len(sessions) == 2 and not any(session["requests"] for session in sessions)

    steps = {"freeze": daemon.freeze, "thaw": daemon.thaw, "look": lambda: until(settled)}
    drive_program(program, daemon, str(model), steps)
    until(lambda: daemon.status()["sessions"] == [])
