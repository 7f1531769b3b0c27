"""Passes the metrics of a run to Weights & Biases: pip install wandb

    trackers:
      - {command: [python3, examples/trackers/wandb_tracker.py]}

The variables of wandb apply: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline. A run that resumes is another run of the same group;
set WANDB_RUN_ID to continue one.
"""

import json
import os
import sys

import wandb

run = None
for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "begin":
        name = os.path.basename(os.path.normpath(event["run_dir"]))
        project = os.environ.get("WANDB_PROJECT", "grpo")
        run = wandb.init(project=project, group=name, name=name, config=event["settings"], resume="allow")
        run.define_metric("*", step_metric="step")
    elif "metrics" in event:
        run.log({"step": event["step"], **event["metrics"]})
    elif event["event"] == "end":
        run.finish(exit_code=0 if event["status"] == "finished" else 1)
