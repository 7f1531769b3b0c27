"""Passes the metrics of a run to MLflow: pip install mlflow

    trackers:
      - {command: [python3, examples/trackers/mlflow_tracker.py]}

The variables of MLflow apply: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME. A run that resumes is another run of MLflow; set
MLFLOW_RUN_ID to continue one.
"""

import json
import os
import sys

import mlflow


def leaves(settings, path=""):
    """The settings by their paths."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        elif value is not None:
            yield f"{path}{key}", str(value)[:500]


for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "begin":
        mlflow.start_run(run_name=os.path.basename(os.path.normpath(event["run_dir"])))
        if "MLFLOW_RUN_ID" not in os.environ:
            mlflow.log_params(dict(leaves(event["settings"])))
    elif "metrics" in event:
        mlflow.log_metrics(event["metrics"], step=event["step"])
    elif event["event"] == "end":
        mlflow.end_run("FINISHED" if event["status"] == "finished" else "KILLED")
