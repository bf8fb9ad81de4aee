"""`kvloom pool bench`: save and load as an engine's rank does them, against memcpy and other stores in the same run.

Agents run as processes of their own; the client is the SDK in this process, so this package alone in `kvloom.pool` may
see all of the SDK. Pages are touched before anything is timed, and figures that are to be compared come
from rounds that take turns.
"""
