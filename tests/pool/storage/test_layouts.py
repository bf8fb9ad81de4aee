"""What Python and C++ of the pool both read has one layout in both."""

from pathlib import Path

import ems.native
from kvloom.pool.cluster.native import library as cluster
from kvloom.pool.storage.native import library as storage
from tests.support.layouts import structs, wrong

EMS = Path(ems.native.__file__).parent
STORAGE = {
    "pool::Counts": storage.Counts,
    "pool::Glance": storage.Glance,
    "pool::Callbacks": storage.Callbacks,
    "pool::Terms": storage.Terms,
    "pool::Save": storage.Save,
    "pool::Arrival": storage.Arrival,
    "pool::Eviction": storage.Eviction,
    "Described": storage.Described,
    "Usage": storage.Usage,
}


def test_the_pool_in_python_has_the_layout_of_cpp():
    assert wrong(Path(storage.__file__).parent / "api.cpp", structs(STORAGE), EMS) == []


def test_the_ends_of_a_tls_connection_have_the_layout_of_cpp():
    assert (
        wrong(Path(cluster.__file__).parent / "tls.hpp", structs({"ems::Tls": cluster.TlsEnds}, str.lower), EMS) == []
    )
