#!/usr/bin/env bash
# Expected: `{{ 'Use: ' | safe + tool | tojson }}` in a chat template writes the tool as JSON: `safe` asks for no escaping, and
# transformers renders templates without it. Functionary medium v3.1's template describes its tools in this way.
# Happens: the JSON has its quotes escaped as HTML. `safe` makes a text of markupsafe's, which escapes whatever is added to
# it; Jinja's own `tojson` gives such a text too, but the `tojson` of transformers gives a plain one.
# transformers 5.24.0, jinja2 3.1.6, run 2026-11-28:
#   without safe: Use: {"name": "f"}
#   with safe:    Use: {&#34;name&#34;: &#34;f&#34;}
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
from transformers.utils.chat_template_utils import render_jinja_template


def rendered(template):
    asked = [[{"role": "user", "content": "hi"}]]
    return render_jinja_template(conversations=asked, tools=[{"name": "f"}], chat_template=template)[0][0]


plain = rendered("{{ 'Use: ' + tools[0] | tojson }}")
safe = rendered("{{ 'Use: ' | safe + tools[0] | tojson }}")
print("without safe:", plain)
print("with safe:   ", safe)
assert plain == 'Use: {"name": "f"}'
assert safe == "Use: {&#34;name&#34;: &#34;f&#34;}"
PY
