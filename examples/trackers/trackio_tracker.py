"""Passes the metrics of a run to trackio: pip install trackio

    trackers:
      - {command: [python3, examples/trackers/trackio_tracker.py]}

`trackio show` opens the dashboard. The variable TRACKIO_PROJECT is the name of the project. A run that resumes goes on in the run of
the same name.
"""

import json
import os
import sys

import trackio

for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "begin":
        name = os.path.basename(os.path.normpath(event["run_dir"]))
        project = os.environ.get("TRACKIO_PROJECT", "grpo")
        trackio.init(project=project, name=name, config=event["settings"], resume="allow")
    elif "metrics" in event:
        trackio.log(event["metrics"], step=event["step"])
    elif event["event"] == "end":
        trackio.finish()
