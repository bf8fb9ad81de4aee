"""Connections between nodes whose CA is taken away."""

import logging

from kvloom.net.devcerts import issue_node, make_authority, make_crl
from kvloom.net.mutual import Trust
from kvloom.writing import write_private
from tests.pool.cluster.test_peer_tls import HASHES, channels, load_at, num_called, save_at, two
from tests.support.pool.node_tls import NodeFiles
from tests.support.waiting import until


def test_a_reload_ends_the_connections_of_nodes_whose_ca_was_taken_away(tmp_path, caplog):
    files = NodeFiles(tmp_path)
    other = make_authority("another CA")
    both = [files.authority, other]
    a_files, b_files = files.config("a"), files.config("b", issue_node(other, "b"))
    for config in (a_files, b_files):
        write_private(config.ca_files[0], b"".join(each.certificate_pem() for each in both))
        write_private(config.crls[0], b"".join(map(make_crl, both)))
    with caplog.at_level(logging.INFO, "kvloom.pool"), two(a_files, b_files) as (a, b):
        for agent, first in ((a, 0), (b, 100)):
            save_at(agent, [h + first for h in HASHES], write_rcache=False)
        assert load_at(b, [*HASHES, 101]) == len(HASHES) + 1
        assert any(channels(a, "b"))
        a.reload_tls()
        assert "TLS files reloaded\n" in caplog.text, "nothing has changed"
        assert any(channels(a, "b"))
        write_private(a_files.ca_files[0], files.authority.certificate_pem())
        write_private(a_files.crls[0], make_crl(files.authority))
        a.reload_tls()
        assert channels(a, "b") == [None, None]
        until(lambda: num_called(a) == 0)
        assert "connections of revoked nodes ended" in caplog.text


def test_trust_follows_the_way_from_a_certificate_to_a_ca(tmp_path):
    files, other = NodeFiles(tmp_path), make_authority("another CA")
    own, foreign = issue_node(files.authority, "a"), issue_node(other, "b")
    trust = Trust(files.config("a", own))
    assert trust.accepts([own.certificate])
    assert trust.accepts([own.certificate, foreign.certificate])
    assert not trust.accepts([foreign.certificate])
    assert not trust.accepts([foreign.certificate, own.certificate, other.certificate])
    config = files.config("a", own)
    files.revoke(config, own)
    assert not Trust(config).accepts([own.certificate])
