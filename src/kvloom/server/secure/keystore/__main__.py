import sys

from kvloom.server.secure.keystore.commands import seceasy_encrypt

sys.exit(seceasy_encrypt())
