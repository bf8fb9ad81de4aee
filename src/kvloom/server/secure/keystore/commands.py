"""`seceasy_encrypt` and `config_mindie_server_tls_cert.py`: spec 3.4.1 and 3.5.1."""

import argparse
import getpass
import sys
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_private_key

from kvloom.net.keystore import KeyStore, KeyStoreError, is_encrypted
from kvloom.net.tlsconfig import DEFAULT_MASTER, DEFAULT_STANDBY
from kvloom.reading import read_bytes
from kvloom.writing import write_private

MAX_FILE_BYTES = 10 * 1024 * 1024
TLS_KEY = Path("security/keys/server.key.pem")
TLS_PASSWORD = Path("security/pass/mindie_server_key_pwd.txt")
TLS_DOMAIN = 1


def seceasy_encrypt(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 1 with one line on stderr."""
    options = _parser().parse_args(arguments)
    store = KeyStore(options.master, options.standby)
    try:
        if options.encrypt:
            print(store.encrypt(_secret("plaintext").encode(), _domain(*options.encrypt)))
        elif options.encryptFile:
            domain, count, path = options.encryptFile
            _encrypt_file(store, _domain(domain, count), Path(path))
            print(f"{path} is encrypted")
        elif options.activeKey:
            store.rotate(_domain(*options.activeKey))
            print("the keys were renewed")
        else:
            _domain("0", options.secureEraseAllKeystore)
            print(f"{store.erase()} key store files erased")
    except (KeyStoreError, OSError) as error:
        print(f"seceasy_encrypt: {error}", file=sys.stderr)
        return 1
    return 0


def config_tls(arguments: list[str] | None = None) -> int:
    """Ask for the password of DIR's TLS key, check it on the key, and store it encrypted in DIR."""
    parser = argparse.ArgumentParser(prog="config_mindie_server_tls_cert.py", description=config_tls.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the server is installed")
    folder: Path = parser.parse_args(arguments).directory
    try:
        password = _secret("password of the private key").encode()
        try:
            load_pem_private_key(read_bytes(folder / TLS_KEY, MAX_FILE_BYTES), password)
        except (ValueError, TypeError) as error:
            raise KeyStoreError(f"{folder / TLS_KEY} is not a private key encrypted with this password") from error
        store = KeyStore(folder / DEFAULT_MASTER, folder / DEFAULT_STANDBY)
        write_private(folder / TLS_PASSWORD, store.encrypt(password, TLS_DOMAIN).encode())
    except (KeyStoreError, OSError) as error:
        print(f"config_mindie_server_tls_cert.py: {error}", file=sys.stderr)
        return 1
    print(f"{folder / TLS_PASSWORD} is written")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seceasy_encrypt", description="Encrypt secrets under a key store.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--encrypt", nargs=2, metavar=("domainId", "domainCount"), help="ask for a text, print it")
    action.add_argument("--encryptFile", nargs=3, metavar=("domainId", "domainCount", "filePath"))
    action.add_argument("--activeKey", nargs=2, metavar=("domainId", "domainCount"), help="renew the keys")
    action.add_argument("--secureEraseAllKeystore", metavar="domainCount", help="destroy the keys: only to uninstall")
    parser.add_argument("--master", type=Path, default=DEFAULT_MASTER, help="kmcKsfMaster (default: %(default)s)")
    parser.add_argument("--standby", type=Path, default=DEFAULT_STANDBY, help="kmcKsfStandby (default: %(default)s)")
    return parser


def _domain(domain: str, count: str) -> int:
    if not (domain.isascii() and domain.isdigit() and count.isascii() and count.isdigit()):
        raise KeyStoreError("domainId and domainCount must be whole numbers (planned: 1 and 2)")
    if not 0 <= int(domain) < int(count) <= 1024:
        raise KeyStoreError("domainId must be below domainCount, and domainCount at most 1024 (planned: 1 and 2)")
    return int(domain)


def _secret(what: str) -> str:
    """Read a secret: asked for twice on a terminal, otherwise the first line of stdin."""
    if not sys.stdin.isatty():
        text = sys.stdin.readline().rstrip("\n")
    else:
        text = getpass.getpass(f"Please enter the {what}: ")
        if getpass.getpass(f"Please enter the {what} again: ") != text:
            raise KeyStoreError("the two inputs differ")
    if not text:
        raise KeyStoreError(f"the {what} must not be empty")
    return text


def _encrypt_file(store: KeyStore, domain: int, path: Path) -> None:
    data = read_bytes(path, MAX_FILE_BYTES)
    if is_encrypted(data[:16].decode(errors="replace")):
        raise KeyStoreError(f"{path} is encrypted already")
    write_private(path, store.encrypt(data, domain).encode())
