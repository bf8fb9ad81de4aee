#!/usr/bin/env bash
# Expected: batch_get_buffer gives None for a key that the store does not have (its get_size is -704 then), and a put of
# values that do not fit into the client's local buffer stores those that do, or says that there is no room.
# Happens: a stored key whose value finds no room in the buffer comes back as None, too. Room is given in eighths of powers
# of two: of 16 values of 1 MiB and 16 bytes, 14 fit into 16 MiB. A put of more than the buffer stores nothing of its
# batch, and its code -600 is that of wrong arguments; -200 is the one of a full store.
# mooncake-transfer-engine-non-cuda 0.3.13.post1, run 2026-11-27:
#   stored 16, got 14, again one by one 16; missing: None, size -704; put of 20 x 1 MiB: -600, stored 0
# Needs Debian's (or Ubuntu's) apt: the wheel links libibverbs, librdmacm, libnuma and libcurl also where TCP is used.
set -euo pipefail
work=$(mktemp -d)
master=
trap '[ -z "$master" ] || kill "$master"; rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
cd "$work"
apt-get download -q libibverbs1 librdmacm1 libnuma1 libnl-3-200 libnl-route-3-200 libcurl4 >apt.log 2>&1
for package in ./*.deb; do dpkg-deb -x "$package" root; done
folders=$(find "$work/root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
export LD_LIBRARY_PATH=$folders
program=$(find "$work/env" -name mooncake_master -path '*mooncake/*')
chmod +x "$program"
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
figures=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$program" -rpc_port="$port" -metrics_port="$figures" >master.log 2>&1 &
master=$!
until python3 -c "import socket; socket.create_connection(('127.0.0.1', $port))" 2>/dev/null; do kill -0 "$master"; done
env/bin/python - "$port" 2>client.log <<'PY'
import secrets
import sys

from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
store = MooncakeDistributedStore()
own = f"127.0.0.1:{20000 + secrets.randbelow(10000)}"
assert store.setup(own, "P2PHANDSHAKE", 128 * MIB, 16 * MIB, "tcp", "", f"127.0.0.1:{sys.argv[1]}") == 0
names = [f"key{i}" for i in range(16)]
for name in names:
    assert store.put_batch([name], [bytes(MIB + 16)]) == 0
stored = sum(store.batch_is_exist(names))
got = sum(value is not None for value in store.batch_get_buffer(names))
alone = sum(store.batch_get_buffer([name])[0] is not None for name in names)
(missing,), size = store.batch_get_buffer(["none"]), store.get_size("none")
others = [f"other{i}" for i in range(20)]
code = store.put_batch(others, [bytes(MIB)] * 20)
kept = sum(store.batch_is_exist(others))
store.close()
print(f"stored {stored}, got {got}, again one by one {alone}; missing: {missing}, size {size}; "
      f"put of 20 x 1 MiB: {code}, stored {kept}")
assert (stored, got, alone, missing, size, code, kept) == (16, 14, 16, None, -704, -600, 0)
PY
