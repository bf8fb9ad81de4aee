import sys

from kvloom.server.keystore.commands import seceasy_encrypt

sys.exit(seceasy_encrypt())
