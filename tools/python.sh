# sh tools/python.sh PYTHON [UV]: ends with a sentence when PYTHON cannot make kvloom's environment.
"$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "kvloom needs Python 3.11 or newer, and $1 is $("$1" --version 2>&1): make PY=python3.11" >&2
  exit 1
}
test -n "$2" || "$1" -c 'import ensurepip' 2>/dev/null || {
  echo "$1 cannot make environments: on Debian and Ubuntu, apt install python3-venv" >&2
  exit 1
}
