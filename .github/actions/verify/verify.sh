#!/usr/bin/env bash
# verify.sh: asks QUESTION of PLACE with OPTIONS; the findings go to SARIF, the answer in words to the log and the summary.
set -uo pipefail
read -ra options <<< "${OPTIONS:-}"
shardmill verify "$QUESTION" "$PLACE" "${options[@]}" --format sarif > "$SARIF"
code=$?
if [ ! -s "$SARIF" ]; then
    rm -f "$SARIF"
    exit "$code"                     # the question could not be asked; the log says why
fi
python3 - "$SARIF" <<'PY' | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
import json, sys

run = json.load(open(sys.argv[1]))["runs"][0]
print(f"shardmill verify {run['properties']['question']}: {run['properties']['status']}")
for note in run["invocations"][0]["toolExecutionNotifications"]:
    print(f"- {note['message']['text']}")
for result in run["results"][:50]:
    print(f"- {result['level']} {result['ruleId']}: {result['message']['text']}")
PY
exit "$code"
